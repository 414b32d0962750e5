"""Models predict small public tables as they did, so that a prior cannot move unnoticed.

``benchmarks/golden_answers.py --write`` stores new figures;
``benchmarks/scoring/moved_constants.py`` moves each chosen number and says what notices.
"""

from __future__ import annotations

import pytest

from forerun.benchmarks.golden_answers import answer_differences
from forerun.benchmarks.golden_figures import FIGURES, figures


@pytest.mark.parametrize("name", FIGURES)
def test_models_predict_as_they_did(name: str) -> None:
    assert not answer_differences(f"figures_{name}", figures(name))
