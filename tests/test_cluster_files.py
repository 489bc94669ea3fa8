"""cluster.yaml is what Ray's cluster launcher takes."""

from pathlib import Path

import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parent.parent


def test_the_launcher_accepts_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # the launcher notes a cluster's state there
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    assert set(config["file_mounts"].values()) == {"~/.ray/auth_token", "."}
    config["file_mounts"] = {}
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["provider"]["type"] == "local" and 1 + len(prepared["provider"]["worker_ips"]) == 2


def test_only_the_loopback_is_served_and_the_metrics_port_is_free():
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    head = next(c for c in config["head_start_ray_commands"] if "--head" in c)
    assert "--dashboard-host=127.0.0.1" in head and "RAY_AUTH_MODE=token" in head
    for command in (head, config["worker_start_ray_commands"][-1]):
        port = int(command.split("--metrics-export-port=")[1].split()[0])
        assert not 10002 <= port <= 19999  # Ray's workers listen there


def test_the_kuberay_manifest_has_two_pods_of_eight_gpus_behind_a_token():
    text = (ROOT / "conf/cluster/kuberay.yaml").read_text()
    manifest = yaml.safe_load(text)
    assert f"FROM rayproject/ray:{ray.__version__}-py311-cu130\n" in text and "torch==2.13." in (ROOT / "requirements.lock").read_text(), "whose CUDA is 13.0"
    spec, (group,) = manifest["spec"], manifest["spec"]["workerGroupSpecs"]
    assert (manifest["apiVersion"], manifest["kind"], spec["authOptions"]) == ("ray.io/v1", "RayCluster", {"mode": "token"})
    assert spec["rayVersion"] == ray.__version__, "the operator turns the token on by this version; it is the one that is installed"
    assert group["replicas"] * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) == 16
    for part in (spec["headGroupSpec"], group):
        pod, ours = part["template"]["spec"], part["template"]["spec"]["containers"][0]
        assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in ours["volumeMounts"]}
        assert ours["resources"]["limits"] == ours["resources"]["requests"]  # else Kubernetes may take the memory back
        assert not 10002 <= int(part["rayStartParams"]["metrics-export-port"]) <= 19999
