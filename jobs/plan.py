"""Memory, time and money of a run before its first dollar; needs no GPU and no Ray.

usage: python jobs/plan.py [FILE.yaml ...] [key=value ...] [options]
       python jobs/plan.py validate TABLE.csv [OUT.csv]
       python jobs/plan.py simulate [FILE.yaml ...] [key=value ...] [--faults NAME | TRACE.csv] [--seeds N]

  --json                   the plan as JSON instead of tables
  --sweep KEY=A,B,C        one plan for each value, side by side
  --hardware FILE ...      the run on each of these hardware files, side by side
  --picture FILE.png       memory by part, and time and cost, against the number of GPUs

validate predicts each source of a table of published runs by constants fitted on its other sources, prints the errors and
writes the predictions. simulate plays the run through under faults (a published rate of raytune70b/planning/faults.csv, all of them where
none is named, or a trace with the columns hours, machine, back_hours, notice_s) and prints its goodput. exit codes: 0 planned (whatever the verdict); 2 wrong input or configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout or an uploaded copy, installed or not

from raytune70b.config import print_anything
from raytune70b.planning.report import main

if __name__ == "__main__":
    print_anything()
    sys.exit(main(__doc__ or ""))
