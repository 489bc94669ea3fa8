import json
import math
from dataclasses import replace

import numpy as np
import pytest

from raytune70b.blocks.order import subset
from raytune70b.config import UserError, compose
from raytune70b.storage import Folder
from raytune70b.sweep.answer import FOUND, answer
from raytune70b.sweep.budget import affordable, cost
from raytune70b.sweep.children import Children
from raytune70b.sweep.points import Point, Result, write_result
from raytune70b.sweep.report import best_yaml, curves_picture, next_command, rates_picture, table_csv
from raytune70b.sweep.run import Sweep, check_settings, prepare_sweep, unfinished_seconds
from raytune70b.sweep.setting import (
    check_price,
    full_blocks,
    settings,
    space,
    sweep_folder,
    sweep_price,
    trial_config,
    trial_order,
    trial_prepared,
    trial_steps,
)
from raytune70b.training.schedule import learning_rate
from tests.conftest import write_blocks
from tests.sweep.world import World, sweep

ARGUMENTS = ["train.global_batch_size=8", "train.micro_batch_size=4", "train.warmup_steps=8", "data.seq_len=16", "sweep.data_fraction=0.25"]


@pytest.fixture
def prepared(tmp_path):
    write_blocks(Folder(tmp_path / "data"), {"train": [200, 184], "validation": [7]}, group=8)
    return prepare_sweep(compose([*ARGUMENTS, f"data.path={tmp_path / 'data'}", f"run.path={tmp_path / 'runs'}"]))


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.25, 0.5, 1.0])
def test_a_subset_holds_its_share_in_whole_row_groups(fraction):
    groups = tuple(int(n) for n in np.random.default_rng(3).integers(1, 65, 40))
    chosen = subset(groups, fraction, 17)
    held = sum(groups[g] for g in chosen)
    assert fraction * sum(groups) <= held + 1e-6 and held - max(groups) < fraction * sum(groups)
    assert chosen == subset(groups, fraction, 17) and list(chosen) == sorted(set(chosen))
    assert fraction in (1.0, 0.001) or chosen != subset(groups, fraction, 18)


def test_the_next_command_is_the_full_run_at_the_answer(prepared):
    """A rate on the command line would win over best.yaml."""
    best = "# found\ntrain:\n  learning_rate: 0.002\n  warmup_steps: 4\nmodel:\n  lora:\n    rank: 8\n"
    given = ["conf/sweep.yaml", "my/llama-sweep.yaml", "sweep.name=rates", "train.learning_rate=1e-4", "model.lora.rank=4", "data.path=a b", "run.name=x", "train.epochs=2"]
    command = next_command(given, best, "/runs/rates/best.yaml", "rates-best")
    assert command == "python jobs/finetune.py my/llama-sweep.yaml /runs/rates/best.yaml 'data.path=a b' train.epochs=2 run.name=rates-best"


H100 = ["hardware.gpu=H100-SXM-80GB", "hardware.nodes=2", "hardware.gpus_per_node=8", "cluster.workers=[8,16]", "budget.price_per_gpu_hour=2.0"]


def test_a_sweep_that_would_spend_the_full_runs_budget_is_refused_beforehand(prepared):
    whole = replace(prepared, config=compose([*ARGUMENTS, *H100, f"data.path={prepared.config.data.path}", f"run.path={prepared.config.run.path}"]))
    found, trials = sweep_price(whole), space(whole).expected
    assert found.usd == pytest.approx(trials * found.trial_hours * 8 * 2.0)
    assert found.hours == pytest.approx(math.ceil(trials / 2) * found.trial_hours), "two trials of eight workers side by side on sixteen GPUs"
    check_price(whole)

    def limited(**limits):
        return replace(whole, config=replace(whole.config, **limits))

    tight = replace(whole.config.budget, usd=found.usd / 2)
    with pytest.raises(UserError, match=r"sweep.data_fraction: .* more than budget.usd .* lower it or train.steps, or bound the sweep by sweep.hours"):
        check_price(limited(budget=tight))
    with pytest.raises(UserError, match=r"more than budget\.hours"):
        check_price(limited(budget=replace(whole.config.budget, hours=found.hours / 2)))
    check_price(limited(budget=tight, sweep=replace(whole.config.sweep, usd=5.0)))
    few = sweep_price(limited(validation=replace(whole.config.validation, max_blocks=1)))
    assert few.trial_hours < found.trial_hours, "validations are counted"
    assert sweep_price(prepared) is None, "nothing is known of a CPU's price"


def test_trials_that_earlier_launches_began_count(prepared):
    """A scheduler that resubmits would else spend without bound."""
    folder = sweep_folder(prepared.config)
    records = [{"kind": "run_start", "time": 100.0, "launch": 1}, {"kind": "group_start", "time": 110.0, "launch": 1, "attempt": 1, "world_size": 2},
               {"kind": "step", "time": 400.0, "launch": 1, "attempt": 1, "step": 1, "world_size": 2}]  # fmt: skip
    (folder / "runs" / "lr0.1-batch8").make().write("journal.jsonl", "".join(json.dumps(r) + "\n" for r in records).encode())
    assert unfinished_seconds(folder, {}) == pytest.approx(300.0)
    limited = compose(["sweep.hours=0.1", "cluster.workers=[2,2]"])
    assert affordable(limited, [], 4, 2, 1, 1)[0] == 2 and affordable(limited, [], 4, 2, 1, 1, unfinished_s=400.0)[0] == 0


def test_all_trials_train_on_the_same_blocks_each_once(prepared):
    base = space(prepared).start
    drawn = set()
    for point in (base, replace(base, seed=99), replace(base, global_batch_size=16, learning_rate=1.0)):
        order, steps = trial_order(prepared, point), trial_steps(prepared, point)
        ids = np.concatenate([ids for _, ids in order.step_ids(0, steps)])
        assert len(set(ids.tolist())) == len(ids) == 96  # a quarter of 384 blocks
        assert {int(i) // 8 for i in ids} <= set(order.only)
        drawn.add(order.only)
    assert len(drawn) == 1


def test_a_trial_has_the_shape_of_the_full_runs_schedule(prepared):
    config, full = prepared.config, prepared.feed.total_steps
    point = space(prepared).start
    trial = trial_config(prepared, point)
    steps = trial_steps(prepared, point)
    assert (full, steps, trial.train.steps, trial.train.warmup_steps) == (48, 12, 12, 2)
    for share in np.linspace(0.2, 0.95, 12):
        own = learning_rate(trial.train, int(share * steps), steps)
        assert own == pytest.approx(learning_rate(config.train, int(share * steps) * 4, full), rel=0.02)


def test_a_trial_changes_its_own_settings_only(prepared):
    point = Point(0.01, 16, 0.1, 32, 5)
    changed = trial_prepared(prepared, point)
    trial, config = changed.config, prepared.config
    assert (trial.train.learning_rate, trial.train.global_batch_size, trial.run.seed) == (0.01, 16, 5)
    assert trial.model.lora.alpha / trial.model.lora.rank == config.model.lora.alpha / config.model.lora.rank
    assert trial.tracking.mlflow is None and trial.checkpoint.at_end is False
    assert replace(trial.train, learning_rate=0, global_batch_size=8, warmup_steps=8, steps=None) == replace(config.train, learning_rate=0)
    assert changed.fingerprint["train.learning_rate"] == 0.01 and changed.fingerprint["data"] == prepared.fingerprint["data"]
    assert changed.run.uri == f"{config.run.path}/sweep/runs/{point.name}"


def test_a_batch_that_the_micro_batch_does_not_divide_gets_a_smaller_one(prepared):
    assert trial_config(prepared, replace(space(prepared).start, global_batch_size=6)).train.micro_batch_size == 2


def test_the_overlay_is_one_that_the_main_job_takes(prepared, tmp_path):
    what = space(prepared)
    results, _ = sweep(what, World(best=what.start.learning_rate, batch_gain=0.2))
    found = answer(what, results)
    assert found.status == FOUND and found.point.global_batch_size == 4
    (tmp_path / "best.yaml").write_text(best_yaml(prepared, found))
    best = compose(["conf/finetune.yaml", str(tmp_path / "best.yaml")])
    assert best.train.learning_rate == found.point.learning_rate
    assert (best.train.global_batch_size, best.train.micro_batch_size) == (4, 4)
    assert best.train.warmup_steps == 16  # a sixth of 96 steps, as 8 are of 48
    assert full_blocks(prepared) == 384


def test_pictures_and_table_of_every_kind_of_result(prepared):
    what = space(prepared)
    results, _ = sweep(what, World(best=1e-3, cliff=0.01))
    found = answer(what, results)
    assert rates_picture(what, results, found).startswith(b"\x89PNG") and curves_picture(list(results.values())).startswith(b"\x89PNG")
    assert len(table_csv(list(results.values())).splitlines()) == len(results) + 1


def test_limits_say_how_many_trials_they_pay_for():
    config = compose(["cluster.workers=[2,2]", "budget.price_per_gpu_hour=10", "sweep.usd=1", "sweep.hours=0.05", "sweep.share=0.8"])
    done = [Result(Point(n + 1.0, 8, 0.1, 16, 17), "finished", (), 1.0, 100, 30.0 * n, 30.0 * n + 30, "") for n in range(2)]
    assert cost(config, done) == pytest.approx(2 * 30 / 3600 * 2 * 10)
    assert affordable(config, done, 9, 1, 100, 1000) == (4, "sweep.hours: 0.05 h")  # 180 s, 60 are used, 30 a trial
    assert affordable(config, done, 9, 2, 100, 1000) == (4, "sweep.usd: $1.00")  # 2 of the 6 trials of 17 cents are paid
    assert affordable(config, done, 9, 9, 100, 500)[0] == 2  # 0.8 x 500 tokens, 200 are used
    assert affordable(compose(["sweep.hours=0.05"]), [], 9, 3, 100, 1000)[0] == 3  # nothing known yet: one round
    assert affordable(compose([]), done, 9, 1, 100, 1000) == (9, "")


def test_a_sweep_is_continued_with_the_same_settings_only(prepared, tmp_path):
    folder = Folder(tmp_path / "sweep").make()
    check_settings(folder, settings(prepared))
    check_settings(folder, settings(prepared))
    other = replace(prepared, config=replace(prepared.config, train=replace(prepared.config.train, beta2=0.99)))
    with pytest.raises(UserError, match=r"train.beta2: 0.95 -> 0.99.*sweep.name"):
        check_settings(folder, settings(other))
    more = replace(prepared, config=replace(prepared.config, sweep=replace(prepared.config.sweep, hours=1.0, max_concurrent=3)))
    check_settings(folder, settings(more))  # a larger budget continues it


def test_what_failed_is_tried_again_and_what_diverged_is_not(prepared):
    folder = sweep_folder(prepared.config).make()
    points = [space(prepared).at(rate) for rate in space(prepared).rates[:3]]
    for point, status in zip(points, ("failed", "diverged", "finished"), strict=True):
        write_result(folder, Result(point, status, (), 1.0 if status == "finished" else None, 10, 0.0, 1.0, "the disk was full"))
    assert set(Sweep(prepared, []).results) == set(points[1:])


@pytest.mark.parametrize(("reason", "code", "way_out"), [
    ("sweep.usd: $1.00 pays for no further trial", 3, "raise sweep.usd and run the same command"),
    ("SIGTERM", 75, "the same command continues"),
])  # fmt: skip
def test_without_an_answer_a_used_up_limit_is_no_reason_to_run_the_same_command(prepared, capsys, reason, code, way_out):
    launch = Sweep(prepared, [])
    launch.stop(reason)
    assert launch._close(Children(prepared, launch.folder)) == code
    assert f"not complete: {reason}; {way_out}" in capsys.readouterr().out


@pytest.mark.parametrize(("override", "text"), [
    ("sweep.low=2 sweep.high=1", "sweep.low: the range of rates goes from 2 to 1;"),
    ("sweep.usd=5", "budget.price_per_gpu_hour"),
    ("sweep.batch_factors=[0.5,-1]", "sweep.batch_factors: holds -1.0"),
    ("sweep.points=2", "sweep.points"),
])  # fmt: skip
def test_wrong_settings_are_named(override, text):
    with pytest.raises(UserError, match=text.replace(".", r"\.")):
        compose(override.split())


def test_too_few_workers_for_a_trial_are_told(tmp_path):
    """A model that two GPUs hold and one does not: the embedded sweep's one worker a trial would end in a lack of memory."""
    write_blocks(Folder(tmp_path / "data"), {"train": [64], "validation": [7]}, group=8)
    shape = "{model_type: llama, hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 30, num_attention_heads: 32, max_position_embeddings: 4096}"
    config = compose([*ARGUMENTS, f"data.path={tmp_path / 'data'}", f"run.path={tmp_path / 'runs'}", f"model.config={shape}", "hardware.gpu=H100-SXM-80GB", "cluster.workers=[2,2]"])
    prepare_sweep(config)
    with pytest.raises(UserError, match=r"sweep\.workers: is 1, but by the memory plan it takes 2 on H100-SXM-80GB; .*cluster\.workers \(2\)"):
        prepare_sweep(replace(config, sweep=replace(config.sweep, workers=1)))


def test_names_tell_points_apart():
    base = Point(1e-3, 16, 0.1, 16, 17)
    others = [replace(base, learning_rate=1.01e-3), replace(base, global_batch_size=8), replace(base, warmup_share=0.2), replace(base, lora_rank=8), replace(base, seed=18)]
    assert len({p.name for p in [base, *others]}) == 6 and not set("/:* ") & set("".join(p.name for p in others))
    assert math.isclose(float(base.name.split("-")[0][2:]), 1e-3)
