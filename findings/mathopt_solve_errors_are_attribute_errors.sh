#!/usr/bin/env bash
# MathOpt (OR-Tools) raises every error of a solver as an AttributeError about its own code, so that the documented
# `except RuntimeError` lets it pass, and the solver's message is lost.
#
# Versions: ortools 9.15.6755, Python 3.11.
# What most would guess: solve() raises what its docstring says (RuntimeError on a solve error), or ValueError for a model that
#   the solver does not support; ortools.math_opt.python.errors maps each status of the solver to such an exception.
# What happens: the function that calls this mapping reads a field that the status object does not have. A model with an integer
#   variable, which the linear solvers GLOP and PDLP refuse, ends with an AttributeError; so does a numerical error of GLOP inside
#   a long column generation, which nobody expects there.
# Output seen:
#   GLOP: AttributeError: 'StatusNotOk' object has no attribute 'canonical_code'
#   PDLP: AttributeError: 'StatusNotOk' object has no attribute 'canonical_code'
#   HIGHS: optimal, 3.0
# Fails (exit code 1) if this changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check ortools==9.15.6755
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from ortools.math_opt.python import mathopt

model = mathopt.Model()
count = model.add_integer_variable(lb=0, ub=3)
model.maximize(count)

for kind in (mathopt.SolverType.GLOP, mathopt.SolverType.PDLP):
    try:
        mathopt.solve(model, kind)
    except RuntimeError:
        raise SystemExit(f"{kind.name}: the documented RuntimeError") from None
    except ValueError:
        raise SystemExit(f"{kind.name}: a ValueError") from None
    except AttributeError as error:
        print(f"{kind.name}: AttributeError: {error}")
        assert "canonical_code" in str(error)
    else:
        raise SystemExit(f"{kind.name} solved a model with an integer variable")

result = mathopt.solve(model, mathopt.SolverType.HIGHS)
assert result.termination.reason == mathopt.TerminationReason.OPTIMAL
print(f"HIGHS: optimal, {result.objective_value()}")
assert result.objective_value() == 3.0
PYTHON
