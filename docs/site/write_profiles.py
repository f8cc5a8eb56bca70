"""Write the tables of ``docs/execution_profiles.md`` from the profiles: ``python docs/site/write_profiles.py``."""

from __future__ import annotations

from pathlib import Path

from partitioner.execution_profile import OURS, PROFILES, ExecutionProfile

PAGE = Path(__file__).resolve().parents[1] / "execution_profiles.md"

_BEGIN, _END = "<!-- tables: written by docs/site/write_profiles.py -->", "<!-- end of tables -->"


def insert_tables(page: str) -> str:
    """Return the text of the page with its tables written again."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{_describe_profiles()}\n{_describe_fields()}\n{_END}{after}"


def _describe_profiles() -> str:
    """Return a table of the facts of each named profile that differ from the runtime of this project, with reasons."""
    rows = ["| profile | fact | why |", "|---|---|---|"]
    for name, profile in PROFILES.items():
        for field, reason in profile.reasons.items():
            rows.append(f"| `{name}` | `{field}={getattr(profile, field)}` | {reason} |")
    return "\n".join([*rows, ""])


def _describe_fields() -> str:
    """Return a table of all fields with their defaults, which are what the runtime of this project does."""
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for name, field in ExecutionProfile.model_fields.items():
        if name != "name":
            rows.append(f"| `{name}` | `{getattr(OURS, name)}` | {field.description} |")
    return "\n".join([*rows, ""])


if __name__ == "__main__":
    PAGE.write_text(insert_tables(PAGE.read_text()))
