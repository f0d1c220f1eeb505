"""What every pod, policy and workload of the chart must keep to."""

import json
import re
import unittest

import chart

MONITORING = {"namespace": {"kubernetes.io/metadata.name": "monitoring"}, "labels": {"app": "prometheus"}}
STRANGER = {"namespace": {"kubernetes.io/metadata.name": "elsewhere"}, "labels": {"app": "shell"}}
NEIGHBOUR = {"namespace": {"kubernetes.io/metadata.name": chart.NAMESPACE}, "labels": {"app": "web"}}


def each_pod():
    """(set, object, pod template) of all sets."""
    for name in chart.SETS:
        for thing, template in chart.pod_templates(chart.objects_of(name)):
            yield name, thing, template


def matches(selector, labels):
    """Whether a label selector takes these labels."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        has, value = rule["key"] in labels, labels.get(rule["key"])
        ok = {"In": value in rule.get("values", []), "Exists": has}[rule["operator"]]
        if not ok:
            return False
    return True


def peer_matches(peer, pod, home):
    """Whether a peer of a NetworkPolicy means this pod."""
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], pod["namespace"]):
            return False
    elif pod["namespace"]["kubernetes.io/metadata.name"] != home:
        return False
    return matches(peer.get("podSelector", {}), pod["labels"])


def allowed(things, source, target, port):
    """Whether the policies of a set let `source` open a TCP connection to `target`."""
    policies = [thing for thing in things if thing["kind"] == "NetworkPolicy"]

    def side(pod, other, kind, rules, peers):
        home = pod["namespace"]["kubernetes.io/metadata.name"]
        own = [p for p in policies if home == chart.NAMESPACE and matches(p["spec"]["podSelector"], pod["labels"])]
        own = [p for p in own if kind in p["spec"]["policyTypes"]]
        if not own:
            return True  # nothing isolates this pod
        for rule in (rule for policy in own for rule in policy["spec"].get(rules, [])):
            if peers in rule and not any(peer_matches(peer, other, home) for peer in rule[peers]):
                continue
            for entry in rule.get("ports", [{}]):
                first = entry.get("port", 0)
                last = entry.get("endPort", first if "port" in entry else 65535)
                if entry.get("protocol", "TCP") == "TCP" and first <= port <= last:
                    return True
        return False

    return side(source, target, "Egress", "egress", "to") and side(target, source, "Ingress", "ingress", "from")


def pod_of(things, component):
    """A pod of the release as policies see it."""
    for _, template in chart.pod_templates(things):
        labels = template["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] == component:
            return {"namespace": {"kubernetes.io/metadata.name": chart.NAMESPACE}, "labels": labels}
    raise AssertionError(f"no pod of {component}")


class Pods(unittest.TestCase):
    def test_every_container_is_locked_down(self):
        seen = 0
        for name, thing, template in each_pod():
            spec = template["spec"]
            for container in chart.containers(template):
                seen += 1
                with self.subTest(set=name, object=chart.title(thing), container=container["name"]):
                    own, pod = container["securityContext"], spec["securityContext"]
                    self.assertTrue(own["runAsNonRoot"] and pod["runAsNonRoot"])
                    self.assertGreater(pod["runAsUser"], 0)
                    self.assertTrue(own["readOnlyRootFilesystem"])
                    self.assertFalse(own["allowPrivilegeEscalation"])
                    self.assertNotIn("privileged", own)
                    self.assertEqual(own["capabilities"]["drop"], ["ALL"])
                    self.assertEqual(pod["seccompProfile"], {"type": "RuntimeDefault"})
                    self.assertFalse(spec["automountServiceAccountToken"])
                    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
                        self.assertNotIn(key, spec)
        self.assertGreater(seen, 20)

    def test_memory_is_locked_only_with_rdma(self):
        for name, thing, template in each_pod():
            for container in chart.containers(template):
                adds = container["securityContext"]["capabilities"].get("add", [])
                stage = container["name"] in ("kv-transfer", "ar-stage", "dit-worker")
                with self.subTest(set=name, object=chart.title(thing), container=container["name"]):
                    self.assertEqual(adds, ["IPC_LOCK"] if name == "gpu-hosts" and stage else [])

    def test_every_container_has_requests_and_a_memory_limit(self):
        for name, thing, template in each_pod():
            for container in chart.containers(template):
                with self.subTest(set=name, object=chart.title(thing), container=container["name"]):
                    resources = container["resources"]
                    self.assertIn("cpu", resources["requests"])
                    self.assertEqual(resources["requests"].keys() - {"cpu"}, resources["limits"].keys() - {"cpu"})

    def test_the_grace_covers_the_longest_request(self):
        for name, thing, template in each_pod():
            if thing["kind"] == "Pod" or "etcd" in thing["metadata"]["name"]:
                continue
            longest = 1200 if name == "production" else 600
            before = [c["lifecycle"]["preStop"]["sleep"]["seconds"] for c in template["spec"]["containers"]]
            with self.subTest(set=name, object=chart.title(thing)):
                self.assertGreater(template["spec"]["terminationGracePeriodSeconds"], longest + max(before))
                for container in template["spec"]["containers"]:
                    if container["name"] != "kv-transfer":
                        self.assertEqual(chart.environment(container)["OMNI_DRAIN_GRACE_S"], str(longest))

    def test_loading_has_the_time_it_is_given_and_health_asks_nobody_else(self):
        for name, thing, template in each_pod():
            for container in chart.containers(template):
                if thing["kind"] == "Pod" or container["name"] == "etcd":
                    continue
                startup, live = container["startupProbe"], container["livenessProbe"]
                with self.subTest(set=name, object=chart.title(thing), container=container["name"]):
                    self.assertEqual(live["httpGet"]["path"], "/livez")
                    self.assertEqual(container["readinessProbe"]["httpGet"]["path"], "/readyz")
                    stage = container["name"] in ("ar-stage", "dit-worker")
                    self.assertEqual(startup["httpGet"]["path"], "/startupz" if stage else "/livez")
                    if stage:
                        budget = startup["periodSeconds"] * startup["failureThreshold"]
                        self.assertGreaterEqual(budget, 5400 if name == "production" else 3600)
                    ports = {port["name"] for port in container["ports"]}
                    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                        self.assertIn(container[probe]["httpGet"]["port"], ports)

    def test_probes_and_scrapes_speak_as_the_admin_ports_do(self):
        told = {"gpu-hosts": ("https", True), "gpu": ("https", False)}
        seen = set()
        for name, _, template in each_pod():
            scheme, _ = told.get(name, ("http", False))
            for container in chart.containers(template):
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    if "httpGet" in container.get(probe, {}) and container["name"] != "etcd":
                        self.assertEqual(container[probe]["httpGet"].get("scheme", "HTTP").lower(), scheme)
        for name in chart.SETS:
            things = chart.objects_of(name)
            scheme, mutual = told.get(name, ("http", False))
            names = {n for t in things if t["kind"] == "Certificate" for n in t["spec"].get("dnsNames", [])}
            secrets = {t["spec"]["secretName"] for t in things if t["kind"] == "Certificate"}
            for thing in (t for t in things if t["kind"] in ("ServiceMonitor", "PodMonitor")):
                for endpoint in thing["spec"].get("endpoints", []) + thing["spec"].get("podMetricsEndpoints", []):
                    seen.add((scheme, mutual))
                    with self.subTest(set=name, object=chart.title(thing)):
                        self.assertEqual(endpoint.get("scheme", "http"), scheme)
                        tls = endpoint.get("tlsConfig", {})
                        self.assertEqual("keySecret" in tls and "cert" in tls, mutual)
                        if names:
                            self.assertIn(tls["serverName"], names)
                            self.assertIn(tls["keySecret"]["name"], secrets)
        self.assertEqual(seen, {("http", False), ("https", False), ("https", True)})

    def test_containers_run_roles_with_settings_the_binary_has(self):
        for name, thing, template in each_pod():
            binary = json.loads((chart.chart_of(name) / "files" / "binary.json").read_text())
            for container in chart.containers(template):
                role = container.get("args", [""])[0]
                if role not in binary["settings"]:
                    self.assertIn(container["name"], ("generate", "etcd"))
                    continue
                with self.subTest(set=name, object=chart.title(thing), role=role):
                    for variable in chart.environment(container):
                        if variable.startswith("OMNI_"):
                            self.assertIn(variable[5:].lower(), binary["settings"][role])

    def test_variables_refer_only_to_earlier_ones(self):
        for name, thing, template in each_pod():
            for container in chart.containers(template):
                # The controller of LeaderWorkerSets puts its variables first.
                known = {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"} if thing["kind"] == "LeaderWorkerSet" else set()
                for entry in container.get("env", []):
                    used = set(re.findall(r"\$\((\w+)\)", entry.get("value") or ""))
                    with self.subTest(set=name, object=chart.title(thing), variable=entry["name"]):
                        self.assertLessEqual(used, known)
                    known.add(entry["name"])

    def test_every_mount_has_a_volume(self):
        for name, thing, template in each_pod():
            claims = thing["spec"].get("volumeClaimTemplates", [])
            volumes = {v["name"] for v in template["spec"].get("volumes", [])} | {c["metadata"]["name"] for c in claims}
            mounts = {m["name"] for c in chart.containers(template) for m in c.get("volumeMounts", [])}
            with self.subTest(set=name, object=chart.title(thing)):
                self.assertEqual(mounts, volumes)


class Objects(unittest.TestCase):
    def test_names_are_unique_and_labels_complete(self):
        for name in chart.SETS:
            seen = set()
            for thing in chart.objects_of(name):
                with self.subTest(set=name, object=chart.title(thing)):
                    self.assertNotIn(chart.title(thing), seen)
                    seen.add(chart.title(thing))
                    self.assertEqual(thing["metadata"]["namespace"], chart.NAMESPACE)
                    labels = thing["metadata"]["labels"]
                    for key in ("name", "instance", "version", "component", "part-of", "managed-by"):
                        self.assertIn(f"app.kubernetes.io/{key}", labels)

    def test_services_budgets_and_monitors_select_something(self):
        for name in chart.SETS:
            things = chart.objects_of(name)
            pods = [t["metadata"]["labels"] for o, t in chart.pod_templates(things) if o["kind"] != "Pod"]
            services = [t["metadata"]["labels"] for t in things if t["kind"] == "Service"]
            for thing in things:
                spec = thing.get("spec", {})
                kind, hit = thing["kind"], None
                if kind == "Service":
                    hit = [p for p in pods if matches({"matchLabels": spec["selector"]}, p)]
                elif kind in ("PodDisruptionBudget", "PodMonitor"):
                    hit = [p for p in pods if matches(spec["selector"], p)]
                elif kind == "ServiceMonitor":
                    hit = [s for s in services if matches(spec["selector"], s)]
                    self.assertEqual(len(hit), 1)
                if hit is not None:
                    with self.subTest(set=name, object=chart.title(thing)):
                        self.assertTrue(hit)
                        if kind in ("Service", "PodDisruptionBudget"):
                            self.assertEqual(len({tuple(sorted(p.items())) for p in hit}), 1, "pods of several kinds")

    def test_what_scales_has_no_fixed_replicas(self):
        scaled = 0
        for name in chart.SETS:
            things = {chart.title(thing): thing for thing in chart.objects_of(name)}
            for thing in list(things.values()):
                if thing["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
                    scaled += 1
                    target = thing["spec"]["scaleTargetRef"]
                    self.assertNotIn("replicas", things[f"{target['kind']}/{target['name']}"]["spec"])
        self.assertEqual(scaled, 2)

    def test_pools_of_one_host_are_stateful_sets_and_others_groups(self):
        kinds = {chart.title(thing) for thing, _ in chart.pod_templates(chart.objects_of("gpu-hosts"))}
        self.assertIn("StatefulSet/demo-omni-ar", kinds)
        self.assertIn("LeaderWorkerSet/demo-omni-dit", kinds)
        group = next(o for o in chart.objects_of("gpu-hosts") if o["kind"] == "LeaderWorkerSet")
        self.assertEqual(group["spec"]["leaderWorkerTemplate"]["size"], 2)
        (container,) = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
        self.assertEqual(container["resources"]["limits"]["nvidia.com/gpu"], 8)
        self.assertEqual(container["resources"]["limits"]["rdma/ib"], 4)
        self.assertEqual(chart.environment(container)["OMNI_PLAN"], "cfg=2,ring=2,ulysses=4,ep=cfg+ring+ulysses")

    def test_one_router_is_replaced_and_several_are_rolled(self):
        for name, kind in [("minimal", "Recreate"), ("etcd", "RollingUpdate")]:
            router = next(o for o in chart.objects_of(name) if o["kind"] == "Deployment")
            self.assertEqual(router["spec"]["strategy"]["type"], kind)

    def test_a_pool_with_a_kv_pool_has_no_sidecar_and_uses_the_pod_of_its_index(self):
        pods = {chart.title(thing): template for thing, template in chart.pod_templates(chart.objects_of("production"))}
        text = pods["StatefulSet/demo-omni-text"]
        self.assertNotIn("initContainers", text["spec"])
        url = chart.environment(text["spec"]["containers"][0])["OMNI_KV_TRANSFER"]
        self.assertEqual(url, f"http://demo-omni-kv-$(POD_INDEX).demo-omni-kv.{chart.NAMESPACE}.svc:7601")


class Network(unittest.TestCase):
    def test_only_what_must_talk_can(self):
        ucx = 7710
        for name in chart.SETS:
            things = chart.objects_of(name)
            if not any(thing["kind"] == "NetworkPolicy" for thing in things):
                self.assertEqual(name, "image-volume")
                continue
            router, ar, dit, test = (pod_of(things, part) for part in ("router", "ar", "dit", "test"))
            client = {"namespace": {"kubernetes.io/metadata.name": "web"}, "labels": {}} if name == "production" else NEIGHBOUR
            process = next(t for o, t in chart.pod_templates(things) if o["kind"] == "Deployment")["spec"]["containers"][0]
            embedded = chart.environment(process)["OMNI_REGISTRY"] == "embedded"
            for source, target, port, expected in [
                (client, router, 7600, True),
                (STRANGER, router, 7600, False),
                (client, router, 7680, True),
                (STRANGER, router, 7680, False),
                (ar, router, 7680, False),
                (client, router, 9600, False),
                (MONITORING, router, 9600, True),
                (MONITORING, router, 7600, False),
                (test, router, 7600, True),
                (test, ar, 7602, False),
                (router, ar, 7602, True),
                (router, dit, 7603, True),
                (router, ar, 7601, True),
                (router, ar, ucx, False),
                (ar, router, 7600, embedded),
                (dit, ar, 7601, True),
                (dit, ar, ucx, True),
                (ar, dit, ucx, True),
                (dit, ar, 7602, False),
                (MONITORING, ar, 9601, True),
                (MONITORING, dit, 9603, True),
                (MONITORING, ar, 7601, False),
                *[(who, pod, port, False) for who in (client, STRANGER, NEIGHBOUR, test)
                  for pod in (ar, dit) for port in (7601, 7602, 7603, ucx, 9601, 9602, 9603)],
                (router, STRANGER, 443, False),
                (dit, STRANGER, 443, False),
            ]:
                with self.subTest(set=name, source=source["labels"], target=target["labels"], port=port):
                    self.assertEqual(allowed(things, source, target, port), expected)

    def test_etcd_is_reached_by_members_and_by_nobody_else(self):
        things = chart.objects_of("etcd")
        etcd = pod_of(things, "etcd")
        for source, port, expected in [
            (pod_of(things, "router"), 2379, True),
            (pod_of(things, "ar"), 2379, True),
            (pod_of(things, "dit"), 2379, True),
            (etcd, 2380, True),
            (pod_of(things, "dit"), 2380, False),
            (pod_of(things, "test"), 2379, False),
            (NEIGHBOUR, 2379, False),
        ]:
            with self.subTest(source=source["labels"], port=port):
                self.assertEqual(allowed(things, source, etcd, port), expected)


if __name__ == "__main__":
    unittest.main()
