"""Put on the workers' PYTHONPATH by the tests: slows steps down and raises in them, as the JSON file in FAULTS_FILE says.

{"pace": seconds a step, "validation_pace": seconds a batch, "raise": {"rank": 1, "step": 30, "times": 2, "text": "..."}}; the file is read at every step, so that a
test can change it while the run goes on. The package itself has no hook for this: the import of its step module is caught.
"""

import importlib.util
import json
import os
import sys
import time

TARGET = "raytune70b.training.step"


class Catcher:
    def find_spec(self, name, path=None, target=None):
        if name != TARGET or "FAULTS_FILE" not in os.environ:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_and_patch(module):
            execute(module)
            module.train_step = disturbed(module.train_step)
            module.validation_sums = slowed(module.validation_sums)

        spec.loader.exec_module = exec_and_patch
        return spec


def disturbed(train_step):
    def step_with_faults(*args, **keywords):
        import torch.distributed as dist

        with open(os.environ["FAULTS_FILE"]) as source:
            faults = json.load(source)
        time.sleep(faults.get("pace", 0))
        fault = faults.get("raise")
        if fault and fault["rank"] == dist.get_rank() and fault["step"] == keywords["step"] and first_times(fault["times"]):
            raise ValueError(fault["text"])
        return train_step(*args, **keywords)

    return step_with_faults


def slowed(validation_sums):
    def sums_after_a_while(*args, **keywords):
        with open(os.environ["FAULTS_FILE"]) as source:
            time.sleep(json.load(source).get("validation_pace", 0))
        return validation_sums(*args, **keywords)

    return sums_after_a_while


def first_times(times):
    """True so many times over all processes."""
    for number in range(times):
        try:
            os.close(os.open(f"{os.environ['FAULTS_FILE']}.{number}", os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            continue
    return False


sys.meta_path.insert(0, Catcher())
