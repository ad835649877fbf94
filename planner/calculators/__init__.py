"""Single formulas with names: what one collective, matrix product, pipeline or rank costs, as documents.

`planner.report.calculators_view` shows them.
"""
