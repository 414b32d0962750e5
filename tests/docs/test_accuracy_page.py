"""Each figure on the page of figures stands in the row of benchmarks/RESULTS.md that it names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")

SETS = {
    ("SimuMax, Llama 70B on 8 B200", "single operators only"): "SimuMax B200 | calibrate_0",
    ("SimuMax, Llama 70B on 8 B200", "and 3 layouts, all subsets"): "SimuMax B200 | calibrate_3",
    ("Sailor, OPT on 4 to 128 GH200", "profiles of whole layers only"):
        "Sailor GH200 | calibrate_0",
    ("Sailor, OPT on 4 to 128 GH200", "and 3 layouts"): "Sailor GH200 | calibrate_3",
    ("vTrain, 18B on 256 A100", "5 layouts"): "vTrain multi node | calibrate_5",
    ("Selene, 22B and 175B", "2 layouts"): "SC'21 / Selene A100 tables | calibrate_2",
    ("Megatron-Bridge, dense and MoE, bf16 to fp4", "3 layouts of the machine"):
        "Megatron-Bridge | calibrate_3",
    ("Megatron-Bridge, MoE alone", "3 layouts of the machine"):
        "Megatron-Bridge, MoE | calibrate_3",
    ("Megatron-Bridge's cards, experts on H100", "3 layouts"):
        "Megatron-Bridge cards, H100 | calibrate_3",
    ("llm-foundry, MPT under FSDP on A100 and H100", "3 layouts of the machine"):
        "llm-foundry, FSDP | calibrate_3",
    ("MLPerf, DGX Cloud: 8 to 10,752 GPUs", "the smallest scale of a series"):
        "pooled: MLPerf systems, DGXC, small tables | scale_out",
    ("five sets, to more nodes (median error)", "layouts on the fewest nodes"):
        "pooled: Sailor GH200, llm-foundry, FSDP, MLPerf systems, DGXC, small tables, nanotron "
        "| more_nodes",
    ("nanotron, Llama 1B on 2 nodes", "3 layouts"): "nanotron | calibrate_3",
}  # fmt: skip
"""Set and what is known of it, on the page: set and protocol in RESULTS.md."""

OPERATORS = "Errors on `ops_ett_fwd_bwd`"
STANDS_IN = {
    "Over all 414 distinct rows": ["| all sets but the synthetic one |"],
    "- **Pipelines between nodes": ["| nanotron | calibrate_3 |"],
    "- **Peak memory**": [
        "| SimuMax (allocated), 12 rows", "| torchtitan (reserved), 6 rows",
        "| Sailor (the device), 14 rows",
    ],
    "- **Stops**": ["| stops that lose, of 246", "| worthwhile stops that are missed"],
    "| 39 published series of MLPerf": ["| Published series: 39 runs"],
    "| 20 of Megatron-LM on a shared": ["| 20 of 300 steps"],
    "The three series that were missed": ["| Published series: 39 runs"],
    "| recipe |": ["| recipe | 13.2% |"],
    "| wider |": ["| wider | 21.7% |"],
    "| deeper |": ["| deeper | 20.2% |"],
    "Steps of the quick start": ["| quick starts, from the line `scored`"],
    "| random 80 % |": [f"{OPERATORS} >> | random |"],
    "| 24 samples of each |": [f"{OPERATORS} >> | few_24 |"],
    "| 8 samples of each |": [f"{OPERATORS} >> | few_8 |"],
    "| the smaller half, scored on the largest fifth |": [f"{OPERATORS} >> | small_to_large |"],
    "| other tensor-parallel degrees |": [f"{OPERATORS} >> | leave_tp |"],
    "Collectives carried from 2 to 8 nodes of Polaris": [
        "| Polaris, 2 to 8 nodes |", "| rows | protocol | n | error | from 16 MiB |",
    ],
    "Operators carried to another GPU": [
        "| another GPU with 32 probes: bf16 products", "| with no probe | 23",
    ],
    "One NVIDIA H200": [
        "one NVIDIA H200 in a virtual machine", "| losses with hooks and without (recipe",
        "| hooked against bare steps, hidden 4096 |", "| the same, hidden 1024, launch-bound",
        "| 40,000 collectives a step: hooked steps",
    ],
    "A run predicted from one of half": [
        "**Predicted from one of the three runs", "**Peak memory**, as told by the model alone",
        "**Each of six layouts from each other one**",
    ],
    "Unmodified Megatron-LM core_v0.16.1": [
        "**Unmodified Megatron-LM core_v0.16.1**", "| hooks that fired; their cost",
        "| model | 1.3B, 24 x 2048", "| modelled step | 1.152 s",
        "| peak memory by the model alone, measured |",
        "| other shapes from one calibration, step |",
        "| full recompute of the 1.3B", "| a model like Llama from the 1.3B",
    ],
    "| hooks in the window, two runs on the CPU |": ["| hooks in the window, two runs on the CPU"],
    "| the step timer after it |": ["| the step timer after it, last rank |"],
    "| looking for orders |": ["| the thread that looks for orders |"],
    "| `import torch` where nobody asked |": ["its search for entry points"],
    "| 16,384 simulated ranks |": ["| 16,384 simulated ranks (TP8 PP16 DP128"],
}  # fmt: skip
"""Line of the page, by how it begins: rows or paragraphs of RESULTS.md, by what they hold.

After ``>>`` stands what the first one behind that paragraph holds.
"""


def numbers(text: str) -> list[str]:
    return [result.replace(",", "") for result in _NUMBER.findall(text)]


def has_figure(source: Iterable[str], figure: str) -> bool:
    """Return True if one of the numbers is the figure, at the digits of the figure."""
    digits = len(figure.partition(".")[2])
    sought = f"{abs(float(figure)):.{digits}f}"
    return any(f"{abs(float(one)):.{digits}f}" == sought for one in source)


def cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]


def results_row(name: str) -> dict[str, str]:
    """The first row of the tables of step times that begins so, by the heads of its columns."""
    lines = RESULTS.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith(f"| {name} |"))
    head = next(line for line in reversed(lines[:place]) if line.startswith("| set |"))
    return dict(zip(cells(head), cells(lines[place]), strict=True))


def page_rows() -> dict[tuple[str, str], list[str]]:
    (table,) = re.findall(r"^\| set \| known .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    result, last = {}, ""
    for line in table.splitlines():
        name, known, *rest = cells(line)
        last = last if name == "the same" else name
        result[last, known] = rest
    return result


def test_every_set_of_the_page_is_held() -> None:
    assert page_rows().keys() == SETS.keys()


@pytest.mark.parametrize(("row", "name"), SETS.items())
def test_a_set_is_as_in_the_results(row: tuple[str, str], name: str) -> None:
    constant, ten, ours, bar, coverage = page_rows()[row]
    truth = results_row(name)
    assert has_figure(numbers(truth["constant rate"])[:1], constant)
    assert has_figure(numbers(truth["ten-term analytical"])[:1], ten)
    first, *further = numbers(ours.replace("theirs 3.4", ""))
    assert has_figure(numbers(truth["ours"])[:1], first)
    assert all(has_figure(numbers(truth["ours"])[1:], one) for one in further)
    assert all(has_figure(numbers(truth["bar"]), one) for one in numbers(bar))
    assert has_figure(numbers(truth["coverage verdict"])[:1], coverage)
    met = [cell == "yes" for cell in truth["met"].split(" / ")[: 2 if further else None]]
    has_one_bar = bar.split()[0].replace(".", "").isdigit() and not further
    assert ("missed" in bar) == (not all(met[:1] if has_one_bar else met))


def paragraphs() -> list[str]:
    """Rows of tables, and paragraphs and lines of code between them."""
    results = []
    for block in re.split(r"\n\n+", RESULTS):
        is_rows = block.startswith("|") or block.startswith("    ")
        results += block.splitlines() if is_rows else [block]
    return results


def paragraph(hint: str) -> str:
    """The first of RESULTS.md that holds the hint."""
    rest = paragraphs()
    for part in hint.split(" >> "):
        place = next((n for n, text in enumerate(rest) if part in " ".join(text.split())), None)
        assert place is not None, f"RESULTS.md has no row or paragraph with {hint!r}"
        rest = rest[place:]
    return rest[0]


def source_table() -> str:
    """That of the page, with its head."""
    return "| source left out |" + PAGE.partition("| source left out |")[2].partition("\n\n")[0]


def figure_lines() -> list[str]:
    """Lines of the page with a figure, outside the table of sets and what only introduces."""
    (table,) = re.findall(r"^\| set \| known .*\n(?:\|.*\n)+", PAGE, re.MULTILINE)
    lines = PAGE.replace(table, "").replace(source_table(), "").splitlines()
    figure = re.compile(r"\d\.\d|\d %|\d us|\d ms|: \d")
    plain = (
        "the 90 % interval",
        "`make gpu-report`",
        "90 % interval",
        "Mean absolute",
        "18 operators",
    )
    return [one for one in lines if figure.search(one) and not one.startswith(plain)]


@pytest.mark.parametrize("line", figure_lines(), ids=lambda line: line[:24])
def test_a_figure_stands_in_the_row_that_it_names(line: str) -> None:
    (begins,) = [begins for begins in STANDS_IN if line.startswith(begins)]
    figures = numbers(line.replace(begins, "", 1) if begins.startswith("|") else line)
    rows = []
    for hint in STANDS_IN[begins]:
        rows.append(paragraph(hint))
    known = numbers(" ".join(rows))
    assert figures and [figure for figure in figures if not has_figure(known, figure)] == []


def test_another_figure_would_be_found() -> None:
    assert has_figure(["+0.04", "5.10"], "5.1") and has_figure(["97.9"], "98")
    assert not has_figure(["5.16"], "5.1") and not has_figure(["19.7"], "9.7")


def source_rows() -> dict[str, list[str]]:
    """Return the page's cells of each held-out source, by its name."""
    return {name: rest for name, *rest in map(cells, source_table().splitlines()[2:])}


def source_truth() -> dict[str, list[str]]:
    """The same in the results, by source: what is known of it from no row, then from three."""
    table = RESULTS.partition("## Sources left out")[2].partition("\n## ")[0]
    results = [cells(line) for line in table.splitlines() if line.startswith("| ")]
    return {name: rest for name, _, *rest in results[1:]}


@pytest.mark.parametrize("name", source_rows())
def test_a_source_is_as_in_the_results(name: str) -> None:
    stated, truth = source_rows()[name], source_truth()[name]
    none, three = truth[:5], truth[5:]
    assert [one.replace(" at ", ", ") for one in stated] == [*none[:2], *three[:4]]


def test_no_source_is_missing_on_the_page() -> None:
    assert source_rows().keys() == source_truth().keys()


def test_the_readme_says_what_the_page_says() -> None:
    (line,) = re.findall(r"^Mean error of the step .*", README, re.MULTILINE)
    none, _, three, *_ = source_rows()["mean over sources"]
    assert f"{three} % from three known layouts" in line and f"{none} % from none" in line
