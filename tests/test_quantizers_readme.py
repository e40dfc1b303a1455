"""The list in quantizers/README.md names every recipe."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "quantizers"


def test_every_recipe_of_this_repository_is_in_the_list() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("    ") and ".py  " in line]
    missing = {file.name for file in FOLDER.glob("*.py")} - set(listed)
    assert not missing
    assert "rtn.py" in listed
