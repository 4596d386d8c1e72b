"""What the YAML of packaging/kubernetes promises, of what Helm and kustomize make of it and with the real program."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import tempfile
import unittest
import urllib.request

import fields
import kubernetes_validate
import rendering
import yaml

PROGRAM = os.environ["KVARTS_PROGRAM"]
#: Of Kubernetes: the newest that the schemas have, and the oldest that the chart takes, as far as they have it.
VERSIONS = ("1.37", "1.25")
GIB = 1 << 30
#: Sets of values, each a file in the chart's folder ci.
SETS = (None, "cluster", "members", "open")


def server_of(objects):
    [daemon_set] = rendering.of_kind(objects, "DaemonSet")
    [container] = daemon_set["spec"]["template"]["spec"]["containers"]
    return daemon_set["spec"]["template"]["spec"], container


def overlays():
    """Folders of recipes that kustomize builds by themselves."""
    found = [folder for folder, _, names in os.walk(rendering.RECIPES) if "kustomization.yaml" in names and not folder.endswith("llm-d")]
    return sorted(found)


def recipes():
    """Each recipe as it is applied: its objects, by its name."""
    made = {os.path.relpath(folder, rendering.RECIPES): rendering.kustomize(folder) for folder in overlays()}
    for name in ("kserve/llminferenceservice.yaml", "dynamo/graph.yaml", "ray/service.yaml"):
        with open(os.path.join(rendering.RECIPES, name), encoding="utf-8") as file:
            made[name] = rendering.objects(file.read())
    made["llm-d"] = over_a_stand_in()
    return made


def over_a_stand_in():
    """llm-d's overlay of its guide, with the names that its files have, and the component over it."""
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "decode"},
        "spec": {
            "selector": {"matchLabels": {"llm-d.ai/role": "decode"}},
            "template": {
                "metadata": {"labels": {"llm-d.ai/role": "decode"}},
                "spec": {
                    "containers": [
                        {
                            "name": "modelserver",
                            "image": "vllm",
                            "env": [{"name": "HF_TOKEN", "value": "x"}],
                            "resources": {"limits": {"memory": "400Gi"}},
                            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                        }
                    ],
                    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
                },
            },
        },
    }
    # Kustomize takes components by relative paths alone.
    with tempfile.TemporaryDirectory() as place:
        os.mkdir(os.path.join(place, "guide"))
        component = os.path.relpath(os.path.join(rendering.RECIPES, "llm-d"), os.path.realpath(place))
        for name, content in (
            ("guide/decode.yaml", deployment),
            ("guide/kustomization.yaml", {"resources": ["decode.yaml"], "namePrefix": "gpu-vllm-"}),
            ("kustomization.yaml", {"resources": ["guide"], "components": [component]}),
        ):
            with open(os.path.join(place, name), "w", encoding="utf-8") as file:
                yaml.safe_dump(content, file)
        return rendering.kustomize(place)


def pods_of(one):
    """The pods that an object makes, as Pods."""
    if fields.known(one):
        return fields.pods(one)
    if "template" in one.get("spec", {}):
        return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": one["spec"]["template"]["spec"]}]
    return []


def bytes_of(quantity):
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi|GiB)", quantity).groups()
    return int(number) * {"M": 1 << 20, "G": GIB}[unit[0]]


class Schemas(unittest.TestCase):
    def valid(self, one, version):
        if fields.known(one):
            self.assertEqual(fields.unknown_fields(one), [], one["kind"])
            for pod in fields.pods(one):
                self.valid(pod, version)
            return
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as fault:
            self.fail(f"{one['kind']} {one['metadata']['name']}, Kubernetes {version}: {fault}")

    def test_what_the_chart_renders_is_valid_for_every_set_of_values(self):
        for name in SETS:
            objects = rendering.render(values=name)
            kinds = {one["kind"] for one in objects}
            self.assertLessEqual({"DaemonSet"}, kinds)
            for version in VERSIONS:
                for one in objects:
                    with self.subTest(values=name, kind=one["kind"], version=version):
                        self.valid(one, version)
        self.assertLessEqual({"NetworkPolicy", "PriorityClass"}, {one["kind"] for one in rendering.render()})
        self.assertLessEqual({"PodMonitor", "PrometheusRule", "ConfigMap", "Service"}, {one["kind"] for one in rendering.render(values="cluster")})

    def test_recipes_are_valid(self):
        for name, objects in recipes().items():
            self.assertTrue(objects, name)
            for one in objects:
                with self.subTest(recipe=name, kind=one["kind"]):
                    self.valid(one, VERSIONS[0])

    def test_a_misspelt_field_is_found_wherever_it_stands(self):
        [daemon_set] = rendering.of_kind(rendering.render(), "DaemonSet")
        daemon_set["spec"]["template"]["spec"]["toleration"] = []
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(daemon_set, VERSIONS[0], strict=True)
        [service] = recipes()["ray/service.yaml"]
        service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
        self.assertEqual(fields.unknown_fields(service), [".spec.rayClusterConfig.workerGroupSpec"])

    def test_values_that_do_not_fit_are_refused_with_their_name(self):
        for sets, said in (
            (['imagee={"tag": "1"}'], "imagee"),
            (['memory.shard=1'], "shard"),
            (["disks=[]"], "disks"),
            (['disks=["mnt"]'], "disks"),
            (['image.digest="latest"'], "digest"),
            (["grpc.enabled=true"], "grpc.tlsSecret"),
            (["grpc.enabled=true", 'grpc.tlsSecret="tls"', 'tokens.secret=""'], "tokens.secret"),
            (["cluster.enabled=true"], "cluster.members"),
            (["cluster.enabled=true", 'cluster.membersConfigMap="m"'], "hostNetwork"),
            (['settings={"KVARTS_LIMITS_SHARED": "1GiB"}'], "KVARTS_LIMITS_SHARED"),
            (['settings={"STORE_BUDGET": "1GiB"}'], "STORE_BUDGET"),
        ):
            with self.subTest(sets=sets), self.assertRaises(rendering.Refused) as refused:
                rendering.text(*sets)
            self.assertIn(said, str(refused.exception))


class Promises(unittest.TestCase):
    def test_the_file_without_helm_is_what_the_chart_renders(self):
        with open(rendering.PLAIN, encoding="utf-8") as file:
            self.assertEqual(file.read(), rendering.plain(), "run scripts/kubernetes render")

    def test_pods_go_where_gpus_are_and_stay(self):
        spec, container = server_of(rendering.render())
        tolerated = {(one["key"], one["operator"], one["effect"]) for one in spec["tolerations"]}
        self.assertIn(("nvidia.com/gpu", "Exists", "NoSchedule"), tolerated)
        self.assertEqual(spec["nodeSelector"], {"kvarts/disks": "yes"})
        [priority] = rendering.of_kind(rendering.render(), "PriorityClass")
        self.assertEqual(spec["priorityClassName"], priority["metadata"]["name"])
        self.assertGreater(priority["value"], 0)
        self.assertGreaterEqual(spec["terminationGracePeriodSeconds"], 120)
        named = rendering.render(values="cluster")
        self.assertEqual(server_of(named)[0]["priorityClassName"], "system-node-critical")
        self.assertEqual(rendering.of_kind(named, "PriorityClass"), [])
        self.assertRegex(server_of(named)[1]["image"], r"^registry\.example/kvarts@sha256:[0-9a-f]{64}$")

    def test_pods_have_no_rights_that_they_do_not_need(self):
        for name in SETS:
            spec, container = server_of(rendering.render(values=name))
            with self.subTest(values=name):
                self.assertIs(spec["enableServiceLinks"], False)
                self.assertIs(spec["automountServiceAccountToken"], False)
                self.assertIs(spec["securityContext"]["runAsNonRoot"], True)
                self.assertGreater(spec["securityContext"]["runAsUser"], 0)
                self.assertIn(spec["securityContext"]["seccompProfile"]["type"], ("RuntimeDefault", "Localhost"))
                own = container["securityContext"]
                self.assertEqual((own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]), (False, True))
                self.assertEqual(own["capabilities"], {"drop": ["ALL"]})
                self.assertEqual([one["name"] for one in spec.get("initContainers", [])], ["directories"] if name == "members" else [])
                kinds = ("Directory", "DirectoryOrCreate") if name == "members" else ("Directory",)
                for volume in spec["volumes"]:
                    # Readable by the group that the pod has, and by no others.
                    self.assertEqual(volume.get("secret", {}).get("defaultMode", 0o440), 0o440, volume)
                    self.assertIn(volume.get("hostPath", {}).get("type", "Directory"), kinds)

    def test_tokens_are_asked_for_unless_it_was_said_that_there_are_none(self):
        spec, container = server_of(rendering.render())
        [volume] = [one for one in spec["volumes"] if one["name"] == "configuration"]
        self.assertEqual(volume["secret"]["secretName"], "kvarts-tokens")
        self.assertFalse(volume["secret"].get("optional", False))
        environment = {one["name"]: one.get("value") for one in container["env"]}
        self.assertEqual(environment["KVARTS_CONFIG"], "/etc/kvarts/kvarts.toml")
        self.assertNotIn("KVARTS_CONFIG", {one["name"] for one in server_of(rendering.render(values="open"))[1]["env"]})

    def test_shared_memory_is_set_and_fits_into_the_limit(self):
        for name in SETS:
            _, container = server_of(rendering.render(values=name))
            environment = {one["name"]: one.get("value") for one in container["env"]}
            parts = [bytes_of(environment[f"KVARTS_LIMITS_{part}"]) for part in ("MEMORY", "INDEX", "SHARED")]
            limit, request = (bytes_of(container["resources"][which]["memory"]) for which in ("limits", "requests"))
            self.assertGreaterEqual(limit, sum(parts) + GIB, name)
            self.assertEqual(limit - request, parts[2], "engines request what they share")

    def test_ports_that_are_let_in_are_those_that_pods_have(self):
        objects = rendering.render(values="cluster")
        _, container = server_of(objects)
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        [policy] = rendering.of_kind(objects, "NetworkPolicy")
        let_in = {port["port"]: rule["from"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        self.assertEqual(set(let_in), set(ports.values()))
        self.assertTrue(all(let_in.values()), "an empty list would be everyone")
        [daemon_set] = rendering.of_kind(objects, "DaemonSet")
        labels = daemon_set["spec"]["template"]["metadata"]["labels"]
        own = {"podSelector": {"matchLabels": policy["spec"]["podSelector"]["matchLabels"]}}
        self.assertEqual((let_in[ports["cluster"]], let_in[ports["lane"]]), ([own], [own]))
        environment = {one["name"]: one.get("value") for one in container["env"]}
        self.assertEqual(environment["KVARTS_CLUSTER_LANE_PORT"], str(ports["lane"]))
        self.assertEqual(environment["KVARTS_CLUSTER_LISTEN"], f"0.0.0.0:{ports['cluster']}")
        self.assertEqual(environment["KVARTS_CLUSTER_ADDRESS"], f"$(POD_IP):{ports['cluster']}")
        for selector in (policy["spec"]["podSelector"], daemon_set["spec"]["selector"]):
            self.assertLessEqual(selector["matchLabels"].items(), labels.items())
        [policy] = rendering.of_kind(rendering.render(values="open"), "NetworkPolicy")
        self.assertEqual((policy["spec"]["policyTypes"], policy["spec"].get("ingress")), (["Ingress"], None))
        closed = rendering.render("networkPolicy.metricsFrom=[]", "networkPolicy.grpcFrom=[]", values="cluster")
        [policy] = rendering.of_kind(closed, "NetworkPolicy")
        self.assertEqual([rule["from"] for rule in policy["spec"]["ingress"]], [[own]])

    def test_the_operator_finds_pods_rules_and_dashboard(self):
        objects = rendering.render(values="cluster", release="inference")
        kinds = ("PodMonitor", "PrometheusRule", "ConfigMap", "DaemonSet")
        [monitor], [rules], [dashboard], [daemon_set] = (rendering.of_kind(objects, kind) for kind in kinds)
        labels = daemon_set["spec"]["template"]["metadata"]["labels"]
        self.assertLessEqual(monitor["spec"]["selector"]["matchLabels"].items(), labels.items())
        self.assertEqual(labels[monitor["spec"]["jobLabel"]], "kvarts", "the job that the rules name")
        _, container = server_of(objects)
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        self.assertIn(endpoint["port"], [one["name"] for one in container["ports"]])
        folder = os.path.join(rendering.ROOT, "packaging", "prometheus")
        with open(os.path.join(folder, "alerts.yml"), encoding="utf-8") as file:
            self.assertEqual(rules["spec"], yaml.safe_load(file))
        with open(os.path.join(folder, "grafana.json"), encoding="utf-8") as file:
            self.assertEqual(json.loads(dashboard["data"]["kvarts.json"]), json.load(file))
        self.assertEqual({one["metadata"]["labels"].get("release") for one in (monitor, rules, dashboard)}, {"prometheus"})
        # Pods that the operator knows are not scraped a second time by their annotations.
        self.assertNotIn("annotations", daemon_set["spec"]["template"]["metadata"])

    def test_versions_are_those_of_the_program(self):
        with open(os.path.join(rendering.ROOT, "Cargo.toml"), encoding="utf-8") as file:
            version = re.search(r'^version = "(.+)"$', file.read(), re.MULTILINE).group(1)
        with open(os.path.join(rendering.CHART, "Chart.yaml"), encoding="utf-8") as file:
            chart = yaml.safe_load(file)
        self.assertEqual((chart["version"], chart["appVersion"]), (version, version))
        self.assertEqual(server_of(rendering.render())[1]["image"], f"kvarts:{version}")


class Engines(unittest.TestCase):
    def test_engines_reach_the_socket_and_share_no_more_than_the_server_takes(self):
        spec, server = server_of(rendering.render())
        environment = {one["name"]: one.get("value") for one in server["env"]}
        path, shared = environment["KVARTS_LISTEN_SOCKET"], bytes_of(environment["KVARTS_LIMITS_SHARED"])
        for name, objects in recipes().items():
            engines = [pod["spec"] for one in objects for pod in pods_of(one)]
            engines = [one for one in engines if any(mount["name"] == "kvarts" for mount in one["containers"][0].get("volumeMounts", []))]
            with self.subTest(recipe=name):
                [engine] = engines
                self.assertEqual(engine["securityContext"]["supplementalGroups"], [spec["securityContext"]["runAsGroup"]])
                self.assertLessEqual(spec["nodeSelector"].items(), engine["nodeSelector"].items())
                [volume] = [one for one in engine["volumes"] if one["name"] == "kvarts"]
                self.assertEqual(volume["hostPath"], {"path": os.path.dirname(path), "type": "Directory"})
                [mount] = [one for one in engine["containers"][0]["volumeMounts"] if one["name"] == "kvarts"]
                self.assertEqual(mount["mountPath"], os.path.dirname(path))
                extra, pool = self.settings(objects, engine["containers"][0])
                self.assertEqual(extra["server"], path)
                self.assertLessEqual(pool, shared)
                self.assertLess(pool, bytes_of(engine["containers"][0]["resources"]["limits"]["memory"]), "the pool is a part of the limit")

    def settings(self, objects, container):
        """What the connector is given, and the bytes of its pool. The class has to be where the configuration says."""
        environment = {one["name"]: one.get("value") for one in container.get("env", [])}
        words = [*container.get("command", []), *container.get("args", [])]
        words += shlex.split(environment.get("VLLM_ADDITIONAL_ARGS", ""))
        if "KVARTS_VLLM" in environment:
            self.assertNotIn("--kv-transfer-config", words, "the variable would have no effect")
            given = self.plugin().configuration(environment["KVARTS_VLLM"])
        elif "--kv-transfer-config" in words:
            given = json.loads(words[words.index("--kv-transfer-config") + 1])
        elif "--unified-cache-external-linker-config" in words:
            linker = json.loads(words[words.index("--unified-cache-external-linker-config") + 1])
            given = {"kv_connector": linker["linker"], "kv_connector_module_path": linker["linker_module_path"]}
            given["kv_connector_extra_config"] = linker["linker_extra_config"]
        else:
            [served] = [yaml.safe_load(one["spec"]["serveConfigV2"]) for one in objects if one["kind"] == "RayService"]
            given = served["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]["kv_transfer_config"]
        module = given["kv_connector_module_path"].removeprefix("kvarts.")
        with open(os.path.join(rendering.ROOT, "python", "kvarts", f"{module}.py"), encoding="utf-8") as file:
            source = file.read()
        self.assertRegex(source, rf"(?m)^class {given['kv_connector']}\b")
        extra = given["kv_connector_extra_config"]
        for key in extra:
            self.assertIn(key, source, "the connector knows the setting")
        # Of vLLM's tier the file is in /dev/shm, which has to have room for it.
        if "cpu_bytes_to_use" in extra:
            return extra, extra["cpu_bytes_to_use"]
        return extra, extra["pool_bytes"]

    def plugin(self):
        path = os.path.join(rendering.ROOT, "python", "kvarts", "vllm_plugin.py")
        spec = importlib.util.spec_from_file_location("vllm_plugin", path)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made

    def test_the_memory_of_vllms_own_tier_has_room_in_dev_shm(self):
        [deployment] = recipes()["vllm/tier"]
        spec = deployment["spec"]["template"]["spec"]
        extra, pool = self.settings([deployment], spec["containers"][0])
        [volume] = [one for one in spec["volumes"] if one["name"] == "shm"]
        self.assertEqual(volume["emptyDir"]["medium"], "Memory")
        self.assertGreater(bytes_of(volume["emptyDir"]["sizeLimit"]), pool)


class Program(unittest.TestCase):
    """The real program, with what a rendered pod gives it; its mounts are folders of a scratch directory."""

    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.place = made.name

    def laid(self, spec, container):
        """The environment and arguments of a container, with its mounts made."""
        mounts = sorted((mount["mountPath"] for mount in container["volumeMounts"]), key=len, reverse=True)
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            folder = self.place + mount["mountPath"]
            os.makedirs(folder, exist_ok=True)
            if "hostPath" not in volumes[mount["name"]]:
                self.fill(folder, mount["name"])

        def here(value):
            for mount in mounts:
                value = re.sub(rf"(^|,){re.escape(mount)}(?=/|,|$)", rf"\g<1>{self.place}{mount}", value)
            return value.replace("$(POD_IP)", "10.1.2.3")

        environment = {one["name"]: here(one["value"]) for one in container["env"] if "value" in one}
        return environment, [here(one) for one in container["args"]]

    def fill(self, folder, name):
        def write(file, content):
            with open(os.path.join(folder, file), "w", encoding="utf-8") as out:
                out.write(content)

        if name == "configuration":
            token = json.loads(self.ran({}, "config", "token", "--json"))
            write("kvarts.toml", f'[[tenants]]\nname = "red"\n[[tokens]]\ntenant = "red"\nrights = ["read", "write"]\nhash = "{token["hash"]}"\n')
        elif name == "members":
            write("members.toml", 'epoch = 1\n[[node]]\nid = "00112233445566778899aabbccddeeff"\naddress = "10.0.0.1:7400"\n')
        elif name in ("tls", "etcd-tls"):
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=kvarts"]
                + ["-addext", "subjectAltName=DNS:kvarts", "-keyout", os.path.join(folder, "tls.key"), "-out", os.path.join(folder, "tls.crt")],
                check=True,
                capture_output=True,
                timeout=rendering.SECONDS,
            )
            with open(os.path.join(folder, "tls.crt"), encoding="utf-8") as certificate:
                write("ca.crt", certificate.read())
        else:
            write({"cluster": "secret", "etcd": "password"}[name], "kvarts:0123456789abcdef0123456789abcdef")

    def ran(self, environment, *arguments):
        done = subprocess.run([PROGRAM, *arguments], env=environment, capture_output=True, text=True, timeout=rendering.SECONDS, cwd=self.place)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_it_knows_every_setting_and_argument_that_pods_give_it(self):
        for name in SETS:
            spec, container = server_of(rendering.render(values=name))
            environment, arguments = self.laid(spec, container)
            self.assertEqual(arguments[0], "serve")
            budget = arguments.index("--budget") + 1
            if not arguments[budget].endswith("%"):
                # Of a larger disk than this one.
                arguments[budget] = "1GiB"
            with self.subTest(values=name):
                checked = json.loads(self.ran(environment, "config", "check", "--json", *arguments[1:]))
                every = "all rights for every client that can open the local socket (no tokens)"
                self.assertEqual(checked["access"], every if name == "open" else "1 tokens")
                shown = json.loads(self.ran(environment, "config", "show", "--json", *arguments[1:]))
                limit = bytes_of(container["resources"]["limits"]["memory"])
                shared = bytes_of(environment["KVARTS_LIMITS_SHARED"])
                self.assertGreater(limit, shown["memory"]["bytes"] + shared, shown["memory"])
                # A slip in a variable of the chart would be found here, too.
                with self.assertRaises(AssertionError):
                    self.ran({**environment, "KVARTS_LIMITS_SHARD": "1GiB"}, "config", "check", *arguments[1:])

    def test_a_pod_that_has_tokens_answers_its_probes_without_one(self):
        spec, container = server_of(rendering.render())
        environment, arguments = self.laid(spec, container)
        environment["KVARTS_LISTEN_METRICS"] = environment["KVARTS_LISTEN_METRICS"].replace(":7441", ":0")
        environment["KVARTS_LISTEN_SOCKET"] = os.path.join(self.place, "s")
        arguments[arguments.index("--budget") + 1] = "64MiB"
        arguments[arguments.index("--socket-group") + 1] = str(os.getgid())
        with open(os.path.join(self.place, "log"), "w+", encoding="utf-8") as log:
            command = [PROGRAM, *arguments, "--segment", "4MiB"]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.place)
            try:
                line = process.stdout.readline()
                log.seek(0)
                self.assertIn("serving ", line, log.read())
                port = int(re.search(r"metrics=0\.0\.0\.0:(\d+)", line).group(1))
                ports = {one["name"]: one["containerPort"] for one in container["ports"]}
                self.assertEqual(ports["metrics"], 7441)
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    asked = container[probe]["httpGet"]
                    self.assertEqual(asked["port"], "metrics")
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{asked['path']}", timeout=5) as answer:
                        self.assertEqual((answer.status, answer.read()), (200, b"ok\n"), probe)
                # What the old manifest asked needs a token: a pod would never have been ready.
                with self.assertRaises(AssertionError):
                    self.ran({}, "stat", "--server", environment["KVARTS_LISTEN_SOCKET"])
            finally:
                process.terminate()
                process.stdout.close()
                process.wait(rendering.SECONDS)

    def test_liveness_asks_what_a_restart_cures_and_no_more(self):
        _, container = server_of(rendering.render())
        self.assertEqual(container["livenessProbe"]["httpGet"]["path"], "/alive")
        self.assertEqual(container["readinessProbe"]["httpGet"]["path"], "/health")
        startup = container["startupProbe"]
        self.assertEqual(startup["httpGet"]["path"], "/alive", "a store that is read-only from the start is not started for ever")
        self.assertGreaterEqual(startup["periodSeconds"] * startup["failureThreshold"], 600)


if __name__ == "__main__":
    unittest.main()
