"""Find the commands that a shell script would run, with variables replaced by their values. Nothing is executed."""

from __future__ import annotations

import ast
import re
import shlex
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from partitioner.interop.layout import LayoutError

_LONGEST = 200_000  # characters of a script, of a command, and of the value of a variable
_MOST_CHARACTERS = 1_000_000  # of all values that are filled in
_MOST_STEPS = 20_000  # statements that are followed, those of a function once for each call
_MOST_CALLS = 20  # functions that call each other
_LONGEST_SUM = 300  # characters of an arithmetic expression
_LARGEST = 10**18  # number in one

_DECLARATION = ("export", "local", "readonly", "declare", "typeset", "let")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_COUNTED = re.compile(r"\(\(\s*([A-Za-z_]\w*)\s*=([^=].*)\)\)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?:(:?[-=?+])([^{}]*))?\}|\$(\w+)")
_CALLERS = re.compile(r"\"?(?:\$[@*]|\$\{[@*](?::(\d{1,3}))?\})\"?")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_NAME = re.compile(r"\$?\b([A-Za-z_]\w*)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_TEST = re.compile(r"(?:!\s*)?(?:\[\[?\s.*\]|\(\(.*\)\)|test\s.*|true|false)", re.DOTALL)
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b, "-eq": lambda a, b: a == b, "!=": lambda a, b: a != b, "-ne": lambda a, b: a != b,
    ">": lambda a, b: a > b, "-gt": lambda a, b: a > b, ">=": lambda a, b: a >= b, "-ge": lambda a, b: a >= b,
    "<": lambda a, b: a < b, "-lt": lambda a, b: a < b, "<=": lambda a, b: a <= b, "-le": lambda a, b: a <= b,
}  # fmt: skip
_SILENT = ("echo", "printf", "exit", "return")
_SUBSTITUTION = re.compile(r"\\.|'|\"|`|\$\(\(|[$<>]\(|[()]", re.DOTALL)
_OUTPUT = re.compile("\ue000(\\d{1,6})\ue001")  # stands for the output of a command while words are split
_FLAGS = re.compile(r"-[neE]+")  # of echo
_TO_OTHERS = (">&2", "1>&2", ">/dev/stderr", ">/dev/null")  # where an output goes that is not the substituted one

# the tree of statements
_DEEPEST = 50  # conditions, loops and functions inside each other

_PART = re.compile(  # what the search for the end of a statement passes over, or looks at
    r"""\\.|'[^']*'|"(?:[^"\\]|\\.)*"|`[^`]*`|(?<!\S)\#[^\n]*|\$\(\(|\$\(|\$\{|\+?=\(|\(\(|(?<!\S)\[\[(?=\s)|\]\]|[(){}]"""
    r"|;;&|;;|;&|;|&&|\|\||\s+|[^\s\\'\"`#$+=(\[\]){};&|]+|.",
    re.DOTALL,
)
_CLOSED_BY = {"$((": "))", "((": "))", "$(": ")", "=(": ")", "+=(": ")", "${": "}", "[[": "]"}
_SEPARATORS = (";;&", ";;", ";&", ";", "&&", "||")
_HEREDOC = re.compile(r"(?<!<)<<-?[ \t]*['\"]?([A-Za-z_]\w*)['\"]?")
_SHELL = re.compile(r"\s*(?:\S*/)?(?:sbatch|bash|sh|srun|ssh)\b")
_FUNCTION = re.compile(r"(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*(?:\{\s*(.*))?", re.DOTALL)
_PATTERN = re.compile(r"\(?([^()]*)\)(.*)", re.DOTALL)
_LOOPS = ("while", "until", "for", "select")
_ENDS = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


class Truth(NamedTuple):
    """The value of a shell condition. ``holds``: whether the condition is true. ``known``: whether ``holds`` is
    certain; otherwise it is an assumption, because the script would have to be run to know the value."""

    holds: bool
    known: bool = True


_UNKNOWN = Truth(True, False)


class ShellScript:
    """The commands and variables of a shell script, found by interpreting its text without running it.

    Variables, arrays, functions, arithmetic, ``if``, ``case``, ``&&`` and ``||`` are interpreted; the body of a loop is
    interpreted once. The output of a command, as in ``$(f 2)`` or between backquotes, is known if the command is
    ``echo``, or a function that only calls ``echo``; any other stays as it is written, and is one word. A variable that
    the script does not set counts as empty in a condition, and stays as written (``$NAME``) in a command. A test for a
    file or folder counts as false. Any other condition that cannot be evaluated counts as true.

    ``commands``: the words of each command, in order. ``variables``: name -> value. ``doubts``: a condition or sourced
    file whose value or content is unknown and on which a command or variable depends -> the assumption about it, as
    text for the user.

    Raise :class:`LayoutError` for a script that is too long, and for an unbalanced quote.
    """

    def __init__(self, text: str) -> None:
        self.commands: list[list[str]] = []
        self.variables: dict[str, str] = {}
        self.doubts: dict[str, str] = {}
        self._functions: dict[str, tuple[Node, ...]] = {}
        self._arguments: list[str] | None = None  # of the function that is called
        self._num_steps = 0
        self._num_characters = 0
        self._depth = 0
        self._output: list[str] | None = None  # lines that the substituted command has printed so far
        self._ended = ""  # ``return`` or ``exit``, once the substituted command has met it
        self._run(_parse_script(text), active=True, doubt="")

    def _run(self, nodes: tuple[Node, ...], *, active: bool, doubt: str) -> None:
        """Interpret the statements ``nodes`` in order, and update commands and variables. ``active``: whether they run;
        otherwise their commands are ignored, and variables that they would set become empty unless they have a value.
        ``doubt``: the text of an enclosing condition whose value is unknown; empty if there is none."""
        before, tested = _UNKNOWN, ""
        for node in nodes:
            if self._ended:
                return
            self._num_steps += 1
            if self._num_steps > _MOST_STEPS:
                raise LayoutError(
                    f"the script runs more than {_MOST_STEPS} commands; expected a script that starts a training run: "
                    "write out its command"
                )
            joined = node.operator in ("&&", "||")
            skipped = joined and before.holds == (node.operator == "||") and bool(tested)
            here, unsure = active and not skipped, doubt or (tested if joined and not before.known else "")
            if isinstance(node, Statement) and _TEST.fullmatch(node.text) and not _COUNTED.fullmatch(node.text):
                before = self._evaluate(node.text) if here else before
                tested = node.text
                continue
            if not joined:
                before, tested = _UNKNOWN, ""
            self._follow(node, active=here, doubt=unsure)

    def _follow(self, node: Node, *, active: bool, doubt: str) -> None:
        if isinstance(node, Function):
            self._functions[node.name] = node.body
        elif isinstance(node, Loop):
            if active and self._output is not None:  # how often it would print is not known
                self.commands.append(["for"])
            self._run(node.condition, active=active, doubt=doubt)
            self._run(node.body, active=active, doubt=doubt)
        elif isinstance(node, Condition):
            self._follow_condition(node, active=active, doubt=doubt)
        elif isinstance(node, Choice):
            self._follow_choice(node, active=active, doubt=doubt)
        elif active:
            self._follow_statement(node.text, doubt)
        else:
            self._skip_statement(node.text, doubt)

    def _follow_condition(self, node: Condition, *, active: bool, doubt: str) -> None:
        settled = not active
        for condition, body in node.branches:
            truth = Truth(True)
            if condition and not settled:
                truth = self._fold(condition)
                text = " ".join(each.text for each in condition if isinstance(each, Statement))
                doubt = doubt or ("" if truth.known else text)
            self._run(body, active=truth.holds and not settled, doubt=doubt)
            settled = settled or truth.holds

    def _fold(self, condition: tuple[Node, ...]) -> Truth:
        """Return whether ``condition`` is true, and whether this is certain. ``condition``: statements joined by ``&&``
        and ``||``, such as those between ``if`` and ``then``. A command among them is added to the list of commands,
        and counts as a condition of unknown value."""
        result = Truth(True)
        for index, node in enumerate(condition):
            if isinstance(node, Statement) and _TEST.fullmatch(node.text):
                truth = self._evaluate(node.text)
            else:
                self._follow(node, active=True, doubt="")
                truth = _UNKNOWN
            result = _join(result, truth, node.operator if index else "&&")
        return result

    def _follow_choice(self, node: Choice, *, active: bool, doubt: str) -> None:
        subject = self._fill_in(node.subject, empty=True).strip("\"'") if active else ""
        if active and _VARIABLE.search(self._fill_in(node.subject)):
            doubt = doubt or f"case {node.subject}"
        settled = not active
        for patterns, body in node.branches:
            matches = any(fnmatchcase(subject[:99], pattern.strip("\"'")[:99]) for pattern in patterns)
            self._run(body, active=matches and not settled, doubt=doubt)
            settled = settled or matches

    def _follow_statement(self, text: str, doubt: str) -> None:
        """Interpret ``text``, a statement that runs: store the values that it assigns, interpret the body of a function
        that it calls, or add it to the list of commands. ``doubt``: the text of an enclosing condition whose value is
        unknown; empty if there is none."""
        if counted := _COUNTED.fullmatch(text):
            self._note(doubt)
            self.variables[counted[1]] = self._compute(counted[2]) or counted[2].strip()
            return
        words = _split_words(text) or [":"]  # nothing but a comment
        declared = words[0] in _DECLARATION
        given = [word for word in words[1:] if not word.startswith("-")] if declared else words
        number = next((i for i, word in enumerate(given) if not _ASSIGNED.fullmatch(word)), len(given))
        if declared or number == len(given):
            self._note(doubt)
            for word in given:
                if found := _ASSIGNED.fullmatch(word.strip("\"'") if words[0] == "let" else word):
                    self._assign(found, counted=words[0] == "let")
            return
        first = given[number]
        if first in _SILENT:
            if self._output is not None and first in ("echo", "printf"):
                self._note(doubt)
                self._print(first, given[number + 1 :])
            elif self._output is not None:
                self._note(doubt)
                self._ended = first
            return
        if first == ":":  # sets variables that are empty
            self._fill_in(text)
            return
        if first == "shift" and self._arguments is not None:
            self._arguments = self._arguments[1:]
        elif first in (".", "source") and len(given) > number + 1:
            self.doubts[f"{first} {given[number + 1]}"] = "what the file sets is not known"
        elif first in self._functions:
            self._call(first, self.split(" ".join(given[number + 1 :]), whole=True), doubt)
        else:
            self.commands.append(self.split(" ".join(given[number:])))
            if any(word.startswith("--") for word in self.commands[-1]):
                self._note(doubt)

    def _skip_statement(self, text: str, doubt: str) -> None:
        """Interpret ``text``, a statement that does not run, because it is in a branch that is not taken. Each variable
        that the statement would set becomes empty, unless it has a value already. ``doubt``: the text of an enclosing
        condition whose value is unknown; empty if there is none."""
        words = _split_words(text) or [":"]
        names = [found[1] for word in words if (found := _ASSIGNED.fullmatch(word))]
        if words[0] in _DECLARATION or len(names) == len(words):
            for name in names:
                self.variables.setdefault(name, "")
        if names or "--" in text or (self._output is not None and words[0] in _SILENT):
            self._note(doubt)

    def _note(self, doubt: str) -> None:
        """Record for the user that a variable or command depends on ``doubt``, the text of a condition whose value is
        unknown, and which value is assumed for it. Do nothing if ``doubt`` is empty."""
        if not doubt:
            return
        unset = sorted({found[1] or found[4] for found in _VARIABLE.finditer(doubt)} - {*self.variables})
        why = f"{', '.join(unset)} may be set outside of the script" if unset else "is not known without running it"
        if doubt.startswith("case "):
            self.doubts[doubt] = f"{why}; taken to be empty"
        else:
            self.doubts[f"if {doubt}"] = f"{why}; taken as {str(self._evaluate(doubt).holds).lower()}"

    def _call(self, name: str, arguments: list[str], doubt: str) -> None:
        before, self._arguments = self._arguments, arguments
        self._depth += 1
        if self._depth > _MOST_CALLS:
            raise LayoutError(
                f"the function {name} of the script calls itself, or more than {_MOST_CALLS} functions call each "
                "other; expected a script that starts a training run: write out its command"
            )
        self._run(self._functions[name], active=True, doubt=doubt)
        self._ended = "" if self._ended == "return" else self._ended
        self._depth -= 1
        self._arguments = before

    def _assign(self, found: re.Match[str], *, counted: bool) -> None:
        """Store the value that an assignment gives a variable. The words of an array are stored with their quotes.
        ``found``: a match with the groups name, ``+`` if the value is appended, and value. ``counted``: whether the
        value is an arithmetic expression."""
        text = found[3].strip()
        if counted:
            value = self._compute(text) or text
        elif text.startswith("("):
            value = self._fill_in(text.removeprefix("(").removesuffix(")"))
        else:
            value = " ".join(self.split(text))
        before = self.variables.get(found[1], "") if found[2] else ""
        self.variables[found[1]] = f"{before} {value}".strip()[:_LONGEST]

    def split(self, text: str, *, whole: bool = False) -> list[str]:
        """Return the words of the shell command ``text``, with variables replaced by their values and without quotes. A
        word that contains several options, such as a variable with the value ``--tp 2 --pp 4``, is split into these
        options, unless ``whole`` is true. Raise :class:`LayoutError` for an unbalanced quote."""
        text = self._fill_in(text)
        text, outputs = _hide_outputs(text)
        try:
            return [
                _OUTPUT.sub(lambda found: "".join(outputs[int(found[1]) :][:1]) or found[0], word)
                for part in shlex.split(text)
                for word in (
                    shlex.split(part)
                    if not whole and (" --" in part or (part.startswith("--") and " " in part))
                    else [part]
                )
            ]
        except ValueError as error:
            raise LayoutError(f"the command is malformed ({error}): {text[:80]!r}; expected balanced quotes") from None

    def _fill_in(self, text: str, *, empty: bool = False) -> str:
        """Return ``text`` with variables and arithmetic expressions replaced by their values. Once the inserted values
        have more than 200,000 characters in total, all further variables stay as written.

        ``empty``: whether a variable without a value is replaced by an empty text; otherwise it stays as written. Raise
        :class:`LayoutError` if the texts that were filled in for the whole script become too long."""
        room = _LONGEST

        def replace(match: re.Match[str]) -> str:
            nonlocal room
            value = self._value_of(match)
            value = ("" if empty else match[0]) if value is None else value
            room -= len(value)
            return value if room >= 0 else match[0]

        arguments = self._arguments
        if arguments is not None:
            text = _CALLERS.sub(lambda found: shlex.join(arguments[max(int(found[1] or 1) - 1, 0) :]), text)
        for _ in range(5):  # a value may name another variable
            replaced = _VARIABLE.sub(replace, text)
            if replaced == text or room < 0:
                break
            text = replaced
        self._num_characters += len(text)
        if self._num_characters > _MOST_CHARACTERS:
            raise LayoutError(
                f"the values of variables have more than {_MOST_CHARACTERS:,} characters; expected a script that "
                "starts a training run: write out its command"
            )
        text = self._substitute(text)
        return _ARITHMETIC.sub(lambda found: self._compute(found[1]) or self._show_outputs(found[0]), text)

    def _show_outputs(self, text: str) -> str:
        """Return ``text``, an arithmetic expression whose value is unknown. Each variable that has the output of a
        command as its value is replaced by that command."""
        values = {name: value for name in _NAME.findall(text) if list_outputs(value := self.variables.get(name, ""))}
        return _NAME.sub(lambda name: values.get(name[1], name[0]), text)[:_LONGEST] if values else text

    def _substitute(self, text: str) -> str:
        """Return ``text`` with each command whose output is known replaced by the output."""
        pieces: list[str] = []
        end = 0
        for start, stop in _find_outputs(text):
            output = None if text[start] in "<>" else self._run_silently(_unwrap_output(text[start:stop]))
            if output is not None:
                pieces += text[end:start], output
                end = stop
        return "".join([*pieces, text[end:]])

    def _run_silently(self, command: str) -> str | None:
        """Return what ``command`` prints, if it and the functions that it calls do nothing but ``echo``; otherwise
        ``None``. Variables and commands of the script stay as they are.
        """
        if self._depth >= _MOST_CALLS:
            return None
        kept = self.variables, self.commands, self._functions, self._output
        self.variables, self.commands, self._functions, self._output = dict(kept[0]), [], dict(kept[2]), []
        self._depth += 1
        try:
            self._run(_parse_script(command), active=True, doubt="")
            return None if self.commands else "\n".join(self._output).strip()
        finally:
            self._depth -= 1
            self._ended = ""
            self.variables, self.commands, self._functions, self._output = kept

    def _print(self, command: str, words: list[str]) -> None:
        """Add the line that ``command``, ``echo`` or ``printf``, prints to the output. ``words``: the words after the
        command, as they are written. If the printed line is not known, add the command to the list of commands instead.
        """
        assert self._output is not None
        if words and words[-1] in _TO_OTHERS:
            return
        values = self.split(" ".join(words), whole=True)
        if command == "echo":
            while values and _FLAGS.fullmatch(values[0]):
                values = values[1:]
        elif len(values) == 2 and re.fullmatch(r"%s(\\n)?", values[0]):
            values = values[1:]
        unclear = len(values) != 1 if command == "printf" else any("\\" in value for value in values)
        if unclear or any(word[0] not in "'\"" and {*word} & {*"|<>&"} for word in words):
            self.commands.append([command, *words])
        else:
            self._output.append(" ".join(values))

    def _value_of(self, match: re.Match[str]) -> str | None:
        """Return the value of a variable, or of a positional parameter of the called function; ``None`` if it has none.
        ``match``: a match of ``$NAME`` or ``${NAME}``; the operators ``:-``, ``:=`` and ``:+`` (default values) are
        applied."""
        name, operator, other = match[1] or match[4], match[2] or "", match[3] or ""
        value = self.variables.get(name)
        if name.isdecimal() and self._arguments is not None:
            number = int(name[:9])
            value = "".join(self._arguments[number - 1 : number]) if number else None
        if operator.endswith("+"):
            return other if value else ""
        if (value or (value == "" and ":" not in operator)) or operator[-1:] not in ("-", "="):
            return value
        if operator.endswith("="):
            self.variables[name] = other
        return other

    def _compute(self, text: str) -> str:
        """Return the value of the arithmetic expression ``text`` as text. It may contain whole numbers, variables,
        parentheses and ``+ - * / %``; return an empty text for anything else."""
        text = _NAME.sub(lambda name: self.variables.get(name[1], name[0]), text).strip()
        if len(text) > _LONGEST_SUM or not re.fullmatch(r"[\d\s+*/%()-]+", text):
            return ""
        try:
            tree = ast.parse(text.replace("/", "//"), mode="eval")
            return str(_evaluate_sum(tree.body))
        except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
            return ""

    def _evaluate(self, text: str) -> Truth:
        """Return the value of ``text``, a shell condition such as ``[ $TP -gt 1 ]`` or ``[[ $A == b && $C ]]``, and
        whether it is certain."""
        text = text.strip()
        if text.startswith("!"):
            truth = self._evaluate(text[1:])
            return Truth(not truth.holds, truth.known)
        if text in ("true", "false"):
            return Truth(text == "true")
        words = _split_words(text.removeprefix("test").strip("[]() \t"))
        result, operator = Truth(True), "&&"
        part: list[str] = []
        for word in [*words, "&&"]:
            if word in ("&&", "||", "-a", "-o"):
                result = _join(result, self._evaluate_words(part), operator)
                operator, part = "||" if word in ("||", "-o") else "&&", []
            else:
                part.append(word)
        return result

    def _evaluate_words(self, words: list[str]) -> Truth:
        """Return the value of a condition without ``&&`` and ``||``, and whether it is certain. ``words``: its words,
        such as ``$TP``, ``-gt`` and ``1``."""
        if words[:1] == ["!"]:
            num_not = next((i for i, word in enumerate(words) if word != "!"), len(words))
            truth = self._evaluate_words(words[num_not:])
            return Truth(truth.holds ^ bool(num_not % 2), truth.known)
        known = not any(self._is_unset(word) for word in words)
        values = [self._fill_in(word, empty=True).strip("\"'") for word in words]
        if len(values) == 1:
            return Truth(values[0] not in ("", "0"), known)
        if len(values) == 2 and values[0] in ("-z", "-n"):
            return Truth((not values[1].strip()) == (values[0] == "-z"), known)
        if len(values) == 2 and values[0] in ("-f", "-d", "-e", "-s", "-r", "-x", "-L"):
            return Truth(False, False)
        if len(values) != 3:
            return _UNKNOWN
        left, operator, right = values
        operator = "==" if operator == "=" else operator
        numbers = [value if value.isdecimal() else self._compute(value) for value in (left, right)]
        if all(number and len(number) <= 18 for number in numbers) and operator in _COMPARISONS:
            return Truth(_COMPARISONS[operator](int(numbers[0]), int(numbers[1])), known)
        if operator in ("==", "!="):
            return Truth(fnmatchcase(left[:99], right[:99]) == (operator == "=="), known)
        return _UNKNOWN

    def _is_unset(self, text: str) -> bool:
        """Return whether the value of ``text``, a word of a condition, is unknown: it contains a variable without a
        value, or the output of a command that is not known."""
        return any(self._value_of(found) is None for found in _VARIABLE.finditer(text)) or bool(
            list_outputs(self._substitute(text))
        )


def _join(left: Truth, right: Truth, operator: str) -> Truth:
    if operator == "||":
        return Truth(left.holds or right.holds, left.known and right.known)
    return Truth(left.holds and right.holds, left.known and right.known)


def _evaluate_sum(node: ast.expr) -> int:
    """Return the value of ``node``, the syntax tree of an expression of integers with ``+``, ``-``, ``*``, ``//`` and
    ``%``. Raise ``ValueError`` for other operations, and if a value exceeds 10**18."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluate_sum(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate_sum(node.left), _evaluate_sum(node.right))
    else:
        raise ValueError
    if abs(value) > _LARGEST:
        raise ValueError
    return value


# --- the output of commands -------------------------------------------------------------------------------------------


def list_outputs(text: str) -> list[str]:
    """Return the command substitutions in ``text`` (commands whose output the shell would fill in) as they are written,
    such as ``$(cat x)``. Substitutions inside other ones or in single quotes are not listed."""
    return [text[start:stop] for start, stop in _find_outputs(text)] if "(" in text or "`" in text else []


def describe_output(value: str, script: str) -> str:
    """Return a text for an error message on ``value``, a word of a command line that is unknown because it contains the
    output of a command: that command, its line in ``script``, and what to do. The text is empty if ``value`` has no
    such command. ``script``: the shell script that contains the word."""
    outputs = list_outputs(value)
    if not outputs:
        return ""
    written = " ".join(outputs[0].split())
    written = written if len(written) <= 80 else f"{written[:80]}..."
    line = _find_line(outputs[0], script)
    place = f" in line {line}" if line else ""
    return (
        f"{written!r}{place}, the output of a command that is not run here; run the script once with `bash -x` on a "
        "machine of the job, which prints the command with all values, and give that command, or write the output into "
        "the script"
    )


def _find_line(output: str, script: str) -> int:
    """Return the number of the line of ``script`` that contains ``output``, a command in ``$()`` or backquotes, whose
    variables may have been replaced by values; 0 if no line does."""
    command = _unwrap_output(output).split()[:1]
    for part in (output, *(f"{opening}{command[0]}" for opening in ("$(", "`", "$( ") if command)):
        place = script.find(part)
        if place >= 0:
            return script.count("\n", 0, place) + 1
    return 0


def _unwrap_output(output: str) -> str:
    return output[1:-1] if output[0] == "`" else output[2:-1]


def _hide_outputs(text: str) -> tuple[str, list[str]]:
    """Return two values: ``text`` with a placeholder without blanks in place of each command substitution (such as
    ``$(cat x)``) and each arithmetic expression; and the list of the replaced texts."""
    pieces: list[str] = []
    outputs: list[str] = []
    end = 0
    for start, stop in _find_outputs(text, arithmetic=True):
        pieces += text[end:start], f"\ue000{len(outputs)}\ue001"
        outputs.append(text[start:stop])
        end = stop
    return "".join([*pieces, text[end:]]), outputs


def _find_outputs(text: str, *, arithmetic: bool = False) -> list[tuple[int, int]]:
    """Return the (start, end) indices in ``text`` of each command substitution, which the shell would replace by
    output: ``$(command)``, commands in backquotes, and ``<(command)`` or ``>(command)``, which become file names.
    ``arithmetic``: whether ``$((expression))`` is included."""
    openings = ("$(", "<(", ">(", "$((") if arithmetic else ("$(", "<(", ">(")
    found: list[tuple[int, int]] = []
    closing: list[str] = []  # kinds of the parentheses that are open
    start, quoted, doubled = -1, False, False
    for part in _SUBSTITUTION.finditer(text):
        token = part[0]
        if token == "'" and (quoted or not doubled) and not closing:
            quoted = not quoted
        elif quoted:
            continue
        elif token == '"' and not closing:
            doubled = not doubled
        elif token == "`" and closing[-1:] == ["`"]:
            closing.pop()
            if not closing:
                found.append((start, part.end()))
        elif token == "`" and not closing:
            start, closing = part.start(), ["`"]
        elif token[-1] == "(" and (closing or token in openings):
            start = start if closing else part.start()
            closing += [")"] * (2 if token == "$((" else 1)
        elif token == ")" and closing[-1:] == [")"]:
            closing.pop()
            if not closing:
                found.append((start, part.end()))
    return found


# --- the tree of statements -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """A simple statement of a shell script: one command or assignment. ``operator``: the operator or separator before
    it, such as ``&&``, ``;`` or a line break. ``text``: its text."""

    operator: str
    text: str


@dataclass(frozen=True)
class Condition:
    """An ``if`` statement of a shell script, with its ``elif`` and ``else``. ``operator``: the operator or separator
    before it, such as ``&&``. ``branches``: pairs (statements of the condition, empty for ``else``; statements that run
    if the condition is true)."""

    operator: str
    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True)
class Choice:
    """A ``case`` statement of a shell script. ``operator``: the operator or separator before it, such as ``&&``.
    ``subject``: the text that is compared with the patterns. ``branches``: pairs (patterns, statements that run if one
    of the patterns matches)."""

    operator: str
    subject: str
    branches: tuple[tuple[tuple[str, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True)
class Loop:
    """A ``for``, ``while``, ``until`` or ``select`` statement of a shell script. ``operator``: the operator or
    separator before it, such as ``&&``. ``condition``: the statements of the loop's condition; empty for ``for``.
    ``body``: the statements inside the loop."""

    operator: str
    condition: tuple[Node, ...]
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Function:
    """The definition of a function in a shell script. ``operator``: the operator or separator before it. ``body``: the
    statements of the function."""

    operator: str
    name: str
    body: tuple[Node, ...]


Node = Statement | Condition | Choice | Loop | Function


def _parse_script(text: str) -> tuple[Node, ...]:
    """Return the statements of the shell script ``text`` as a tree. A construct without an end, such as ``if`` without
    ``fi``, extends to the end of the script. Raise :class:`LayoutError` for a script that is too long or nested too
    deeply."""
    if len(text) > _LONGEST:
        raise LayoutError(
            f"the text has {len(text)} characters, which is too long; expected a command line or a shell script"
        )
    parser = _Parser(deque(_list_statements(_drop_documents(text))))
    nodes: list[Node] = []
    while parser.left:
        nodes += parser.take_nodes((), 0)
        if parser.left:  # an end without a start
            parser.left.popleft()
    return tuple(nodes)


def _split_words(text: str) -> list[str]:
    """Return the words of the shell statement ``text`` as they are written, with quotes and variables."""
    return [word for _, word in _split(text, blanks=True)]


def _drop_documents(text: str) -> str:
    r"""Return the shell script ``text`` with continued lines (``\`` at the end) joined, and without the contents of
    here-documents (``cat <<EOF``). The content is kept if the command that reads it is a shell or starts one, such as
    ``bash`` or ``ssh``."""
    given = re.sub(r"\\\r?\n", " ", text).splitlines()
    last = {line.strip(): number for number, line in enumerate(given)}
    lines: list[str] = []
    number = 0
    while number < len(given):
        lines.append(given[number])
        found = _HEREDOC.search(given[number])
        if found and not _SHELL.match(given[number]) and last.get(found[1], -1) > number:
            number = next(after for after in range(number + 1, len(given)) if given[after].strip() == found[1])
        number += 1
    return "\n".join(lines)


def _list_statements(text: str) -> list[Statement]:
    return [Statement(operator, statement) for operator, statement in _split(text, blanks=False)]


def _split(text: str, *, blanks: bool) -> list[tuple[str, str]]:
    """Split shell text outside of quotes and parentheses, at operators (``;``, ``&&``, ``||`` and so on) and ends of
    lines or, with ``blanks``, at white space. Return pairs (the operator or line break before a piece, the piece).
    Comments are dropped."""
    pieces: list[tuple[str, str]] = []
    closing: list[str] = []  # the characters that end what is open
    operator, piece = "\n", ""
    for found in _PART.finditer(text):
        part = found[0]
        if part[0] == "#" and (found.start() == 0 or text[found.start() - 1].isspace()):  # a comment
            continue
        ends = part.isspace() if blanks else part in _SEPARATORS or (part.isspace() and "\n" in part)
        if ends and not closing:
            if piece.strip():
                pieces.append((operator, piece.strip()))
                operator = "\n"
            operator = part.strip() or operator if part.strip() or piece.strip() else operator
            piece = ""
            continue
        if part in _CLOSED_BY:
            closing += _CLOSED_BY[part]
        elif part == "(" and closing and closing[-1] == ")":
            closing.append(")")
        elif closing and part[0] == closing[-1] and part in (")", "}", "]]"):
            closing.pop()
        piece += " " if part.isspace() else part
    return [*pieces, (operator, piece.strip())] if piece.strip() else pieces


def _drop_parenthesis(statement: Statement) -> Statement:
    """Return ``statement`` without an unmatched ``)`` at its end, which closes a subshell."""
    text = statement.text
    if text.endswith(")") and text.count(")") > text.count("("):
        return Statement(statement.operator, text[:-1].strip() or ":")
    return statement


@dataclass
class _Parser:
    """Builds the tree of a shell script's statements. ``left``: the simple statements that have not been read yet, in
    order."""

    left: deque[Statement] = field(default_factory=deque)

    def take_nodes(self, ends: Collection[str], depth: int) -> tuple[Node, ...]:
        """Read and return statements until the next one starts with a word of ``ends`` (such as ``fi``) or, if ``ends``
        contains ``;;``, follows ``;;``. That next statement is not read. ``depth``: nesting depth of these statements.
        Raise :class:`LayoutError` if it is too large."""
        if depth > _DEEPEST:
            raise LayoutError(
                f"the script has conditions nested more than {_DEEPEST} deep; expected a script that starts a training "
                "run: write out its command"
            )
        nodes: list[Node] = []
        while self.left:
            operator, word = self.left[0].operator, self.left[0].text.split(None, 1)[0]
            if word in ends or (nodes and operator[:2] in (";;", ";&") and ";;" in ends):
                break
            if word in _ENDS:
                if not ends:
                    break
                self._take_word()
            elif word in ("{", "time"):
                self._take_word()
            elif word[0] == "(" and word[:2] != "((":  # a shell of its own
                first = self.left.popleft()
                if rest := first.text[1:].strip():
                    self.left.appendleft(Statement(operator, rest))
            elif word == "if":
                nodes.append(self._take_condition(operator, depth))
            elif word == "case" and _split_words(self.left[0].text)[2:3] == ["in"]:
                nodes.append(self._take_choice(operator, depth))
            elif word in _LOOPS:
                nodes.append(self._take_loop(operator, word, depth))
            elif found := _FUNCTION.fullmatch(self.left[0].text):
                nodes.append(self._take_function(operator, found, depth))
            else:
                nodes.append(_drop_parenthesis(self.left.popleft()))
        return tuple(nodes)

    def _take_word(self) -> None:
        """Remove the first word (such as ``if``) of the next unread statement. A statement that is then empty is
        removed."""
        first = self.left.popleft()
        rest = first.text.partition(first.text.split(None, 1)[0])[2].strip()
        if rest:
            self.left.appendleft(Statement(first.operator, rest))

    def _skip_end(self, *words: str) -> None:
        """Remove the next unread statement if it starts with one of ``words``, such as ``done``. All of its text is
        removed, also a redirection such as ``done < file``."""
        if self.left and self.left[0].text.split(None, 1)[0] in words:
            self.left.popleft()

    def _take_condition(self, operator: str, depth: int) -> Condition:
        branches: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
        word = "if"
        while self.left and word in ("if", "elif", "else"):
            self._take_word()
            condition = () if word == "else" else self.take_nodes(("then", "fi"), depth + 1)
            if self.left and self.left[0].text.split(None, 1)[0] == "then":
                self._take_word()
            branches.append((condition, self.take_nodes(("elif", "else", "fi"), depth + 1)))
            word = self.left[0].text.split(None, 1)[0] if self.left else ""
        self._skip_end("fi")
        return Condition(operator, tuple(branches))

    def _take_choice(self, operator: str, depth: int) -> Choice:
        words = _split_words(self.left.popleft().text)
        if words[3:]:
            self.left.appendleft(Statement("\n", " ".join(words[3:])))
        branches: list[tuple[tuple[str, ...], tuple[Node, ...]]] = []
        while self.left and self.left[0].text.split(None, 1)[0] != "esac":
            pattern = _PATTERN.fullmatch(self.left.popleft().text)
            if pattern is None:  # of no branch
                continue
            if rest := pattern[2].strip():
                self.left.appendleft(Statement("\n", rest))
            empty = not rest and self.left and self.left[0].operator[:2] in (";;", ";&")
            body = () if empty else self.take_nodes((";;", "esac"), depth + 1)
            branches.append((tuple(each.strip() for each in pattern[1].split("|")), body))
        self._skip_end("esac")
        return Choice(operator, words[1], tuple(branches))

    def _take_loop(self, operator: str, word: str, depth: int) -> Loop:
        condition: tuple[Node, ...] = ()
        if word in ("for", "select"):
            self.left.popleft()
        else:
            self._take_word()
            condition = self.take_nodes(("do", "done"), depth + 1)
        if self.left and self.left[0].text.split(None, 1)[0] == "do":
            self._take_word()
        body = self.take_nodes(("done",), depth + 1)
        self._skip_end("done")
        return Loop(operator, condition, body)

    def _take_function(self, operator: str, found: re.Match[str], depth: int) -> Function:
        self.left.popleft()
        if found[3]:
            self.left.appendleft(Statement("\n", found[3]))
        elif found[3] is None and self.left and self.left[0].text.split(None, 1)[0] == "{":
            self._take_word()
        body = self.take_nodes(("}",), depth + 1)
        self._skip_end("}")
        return Function(operator, found[1] or found[2], body)
