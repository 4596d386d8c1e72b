"""Objects of operators: the fields that they have as far as their public examples show, and where they have pods.

No registry has these operators' schemas, so a field that is misspelt is found and a value of a wrong type is not. Inside of a pod Kubernetes' own schema
decides. Read on 2026-11-29: github.com/prometheus-operator/prometheus-operator (example/prometheus-operator-crd), github.com/kserve/kserve
(docs/samples/llmisvc), github.com/ai-dynamo/dynamo (examples/backends/vllm/deploy/v1beta1, deploy/operator/api/v1beta1),
github.com/ray-project/kuberay (ray-operator/config/samples).
"""

POD = "a pod's spec"
TEMPLATE = "a pod's template"
ANY = "anything"

_POD_MONITOR = {"jobLabel": ANY, "selector": {"matchLabels": ANY}, "podMetricsEndpoints": [{"port": ANY, "path": ANY, "interval": ANY}]}
_RULE = {"alert": ANY, "expr": ANY, "for": ANY, "labels": ANY, "annotations": ANY}
_INFERENCE = {
    "model": {"uri": ANY, "name": ANY},
    "replicas": ANY,
    "router": {"scheduler": ANY, "route": ANY, "gateway": ANY},
    "template": POD,
}
_COMPONENT = {"name": ANY, "type": ANY, "replicas": ANY, "sharedMemorySize": ANY, "runtimeVersionOverride": ANY, "podTemplate": TEMPLATE}
_HEAD = {"rayStartParams": ANY, "template": TEMPLATE}
_WORKERS = {"groupName": ANY, "replicas": ANY, "minReplicas": ANY, "maxReplicas": ANY, **_HEAD}

SPECS = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _POD_MONITOR,
    ("monitoring.coreos.com/v1", "PrometheusRule"): {"groups": [{"name": ANY, "rules": [_RULE]}]},
    ("serving.kserve.io/v1alpha2", "LLMInferenceService"): _INFERENCE,
    ("nvidia.com/v1beta1", "DynamoGraphDeployment"): {"components": [_COMPONENT]},
    ("ray.io/v1", "RayService"): {"serveConfigV2": ANY, "rayClusterConfig": {"rayVersion": ANY, "headGroupSpec": _HEAD, "workerGroupSpecs": [_WORKERS]}},
}


def known(one):
    return (one["apiVersion"], one["kind"]) in SPECS


def unknown_fields(one):
    """Paths of fields that are not in the list."""
    found = [f".{name}" for name in one if name not in ("apiVersion", "kind", "metadata", "spec")]
    return found + _unknown(one["spec"], SPECS[one["apiVersion"], one["kind"]], ".spec")


def _unknown(value, form, path):
    if form in (ANY, POD, TEMPLATE):
        return []
    if isinstance(form, list):
        return [fault for at, item in enumerate(value) for fault in _unknown(item, form[0], f"{path}[{at}]")]
    faults = [f"{path}.{name}" for name in value if name not in form]
    return faults + [fault for name in value if name in form for fault in _unknown(value[name], form[name], f"{path}.{name}")]


def pods(one):
    """The pods inside of it, as Pods."""
    return list(_pods(one["spec"], SPECS[one["apiVersion"], one["kind"]]))


def _pods(value, form):
    if form == POD:
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": value}
    elif form == TEMPLATE:
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **value.get("metadata", {})}, "spec": value["spec"]}
    elif isinstance(form, list):
        for item in value:
            yield from _pods(item, form[0])
    elif isinstance(form, dict):
        for name in value:
            yield from _pods(value[name], form.get(name, ANY))
