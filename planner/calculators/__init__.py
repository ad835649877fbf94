"""Single formulas with names: what one collective, GEMM, pipeline or rank costs. Each module has a function
that gives a document, and one that makes a view of it."""
