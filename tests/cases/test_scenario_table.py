"""docs/field-scenarios.md names tests that exist, and every scenario once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "field-scenarios.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.splitlines()
    if re.match(r"\| (B\d+|\d+)", line)
]
SHORT = {
    "cases": "cases/test_field_scenarios_pcp.py",
    "cases_model": "cases/test_field_scenarios_pcp_model.py",
    "cases_cache": "cases/test_field_scenarios_cache.py",
    "cases_replay": "cases/test_field_scenarios_replay.py",
    "cases_requests": "cases/test_field_scenarios_requests.py",
    "invariants": "cases/test_cache_invariants.py",
}
K1_K2 = "B001 B003 B004 B005 B006 B008 B009 B025 B026 B027 B028 B030 B031 B032 B035"
K3 = "B011 B012 B013 B014 B015 B016 B019 B020 B021 B024"
K4_K5 = "B036 B037 B038 B039 B041 B042 B043 B046 B166 B167 B168 B169 B170 B171 B173 B174 B175"
K6_K11 = "B068 B069 B071 B072 B074 B075 B076 B077 B078 B079 B080 B084"
K16_K17 = "B159 B162 B163 B165 B130 B132 B133 B136"
K18_K19 = "B147 B148 B149 B177 B180 B181 B182 B184 B185 B186"
K14_K15_K20 = "B111 B112 B115 B116 B118 B120 B121 B123 B124 B137 B139 B140 B142 B143 B144"


def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_named_tests_exist(row: list[str]) -> None:
    _, about, where = row
    assert about
    named = re.findall(r"([\w/.]+)::(test_\w+)", where)
    for place, name in named:
        assert name in names_in(SHORT.get(place) or place), f"{place}::{name}"
    files = re.findall(r"(?<![\w:])([a-z]+/test_\w+\.py)", where)
    assert all((ROOT / "tests" / file).is_file() for file in files)
    assert named or files or "not apply yet: " in where


def test_every_scenario_of_these_classes_is_there_once() -> None:
    listed = [row[0] for row in ROWS if row[0].startswith("B")]
    classes = (K1_K2, K3, K4_K5, K6_K11, K14_K15_K20, K16_K17, K18_K19)
    assert listed == " ".join(classes).split()


def test_every_scenario_test_is_in_the_table() -> None:
    for path in SHORT.values():
        names = {name for name in names_in(path) if name.startswith("test_")}
        assert names <= set(re.findall(r"test_\w+", TABLE))
