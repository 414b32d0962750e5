"""Presentation of answers: tables, charts, sentences and lines, and their renderers.

In: an ``Answer``, a plan, a difference. Out: text, ``report.html``, JSON, rows of sinks.
A new value is a column of one table here; a new output is another renderer of the same parts.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .answer_tables import (
        MODEL_ERROR,
        BestLayout,
        forecast_tables,
        layouts_table,
        notes_of,
        plan_notes,
        plans_table,
        rest_json,
        scaling_text,
        summary_values,
        tables_of,
        wandb_tables,
    )
    from .answers import (
        PAGE,
        REQUEST,
        SCORE,
        page_of,
        render,
        write_answer,
        write_end,
        write_forecast,
        write_page,
        write_score,
    )
    from .canvas import Drawing
    from .charts import finish_chart, waterfall
    from .explain_text import difference_lines, difference_markdown, explanation_parts
    from .progress import search_effort, waiting
    from .table import (
        Command,
        Part,
        ReportTable,
        console,
        html_of,
        markdown_rows,
        print_parts,
        screen_of,
        show_table,
        table_of,
        text_of,
        wrapped,
    )

__getattr__ = lazy_getattr(__name__)
