"""CP-SAT comes without pandas, and pandas is there for whoever wants it."""

import subprocess
import sys

import pytest

LOADED = """
import sys
from meshwright.planner.solvers.or_tools import cp_model
print("pandas" in sys.modules)
model = cp_model.CpModel()
count = model.new_int_var(0, 5, "count")
model.maximize(count)
solver = cp_model.CpSolver()
print(solver.status_name(solver.solve(model)), solver.value(count), "pandas" in sys.modules)
import pandas
series = model.new_bool_var_series("s", pandas.Index([1, 2]))
print(type(series) is pandas.Series, len(series))
"""
BESIDE_A_THREAD = """
import sys, threading
done = threading.Event()
threading.Thread(target=done.wait).start()
from meshwright.planner.solvers.or_tools import cp_model
print(sys.modules["pandas"].__spec__ is not None)
done.set()
"""


def _printed(code: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_a_model_is_solved_without_pandas_which_still_serves_others() -> None:
    assert _printed(LOADED) == ["False", "OPTIMAL", "5", "False", "True", "2"]


@pytest.mark.slow
def test_no_other_thread_sees_the_stand_in() -> None:
    assert _printed(BESIDE_A_THREAD) == ["True"]
