"""The rendered pods really work together: their containers run as processes, each pod in a network namespace of its own,
with the environment that the chart gives them, behind a firewall that lets pass what the network policies allow. Then the
test pod's command makes an image.

Needs root, for the namespaces, and the binaries: OMNI_BIN_DIR."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import chart
from test_policy import allowed

MODEL = chart.HERE.parent / "demo-model" / "checkpoint"
PORTS = [2379, 2380, *range(7600, 7604), 7680, *range(9600, 9604)]
UCX = (7700, 7763)
# Host, port, path, and perhaps a certificate and its key.
ASK = """import http.client, ssl, sys
context = ssl._create_unverified_context()
if len(sys.argv) > 4:
    context.load_cert_chain(sys.argv[4], sys.argv[5])
site = http.client.HTTPSConnection(sys.argv[1], int(sys.argv[2]), context=context, timeout=10)
site.request("GET", sys.argv[3])
print(site.getresponse().status)"""
START_SECONDS, IMAGE_SECONDS, STOP_SECONDS = 120, 120, 60
# Namespaces are the machine's, so their names carry this process.
PREFIX = f"omni{os.getpid()}"


def run(*command, **options):
    """Runs a command that must succeed."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def issue(things, folder):
    """What cert-manager does: a secret, as a folder of files, for each Certificate among the objects."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    authority, key = folder / "ca.crt", folder / "ca.key"
    run("openssl", "req", "-x509", *curve, "-keyout", key, "-out", authority, "-days", "2", "-subj", "/CN=test")
    for spec in (thing["spec"] for thing in things if thing["kind"] == "Certificate"):
        secret = folder / spec["secretName"]
        secret.mkdir()
        names = [f"URI:{uri}" for uri in spec["uris"]] + [f"DNS:{name}" for name in spec.get("dnsNames", [])]
        (secret / "ext").write_text(f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth,clientAuth\n")
        run("openssl", "req", *curve, "-keyout", secret / "tls.key", "-out", secret / "csr", "-subj", "/CN=test")
        run("openssl", "x509", "-req", "-in", secret / "csr", "-CA", authority, "-CAkey", key, "-CAcreateserial",
            "-days", "2", "-extfile", secret / "ext", "-out", secret / "tls.crt")
        (secret / "ca.crt").write_text(authority.read_text())


class Pod:
    """A pod: a namespace with an address, and the processes of its containers."""

    def __init__(self, name, number, index, template):
        self.name, self.index, self.template = name, index, template
        self.namespace = f"{PREFIX}-{number}"
        self.ip = f"10.244.7.{number}"
        self.labels = template["metadata"]["labels"]
        self.processes = []

    def as_peer(self):
        return {"namespace": {"kubernetes.io/metadata.name": chart.NAMESPACE}, "labels": self.labels}

    def environment(self, container, folder):
        """Variables as the kubelet would expand them."""
        values = {"PATH": os.environ["PATH"]}
        for entry in container.get("env", []):
            if "valueFrom" in entry:
                field = entry["valueFrom"]["fieldRef"]["fieldPath"]
                value = {"status.podIP": self.ip, "metadata.name": self.name}.get(field, str(self.index))
            else:
                value = re.sub(r"\$\((\w+)\)", lambda m: values[m.group(1)], entry["value"])
            values[entry["name"]] = value
        if "OMNI_MODEL" in values:
            values["OMNI_MODEL"] = str(MODEL)  # instead of the volume
        if "ETCD_DATA_DIR" in values:
            values["ETCD_DATA_DIR"] = str(folder / f"{self.name}.etcd")
        for volume in self.template["spec"].get("volumes", []):
            if volume["name"] == "tls":
                secret = str(folder / "secrets" / volume["secret"]["secretName"])
                values = {key: value.replace("/etc/omni/tls", secret) for key, value in values.items()}
        return values


class Cluster:
    """Pods on a bridge."""

    def __init__(self, things, folder, names=None):
        self.folder, self.things, self.pods, services = pathlib.Path(folder), things, [], {}
        self.etcds = sum("etcd" in thing["metadata"]["name"] for thing, _ in chart.pod_templates(things))
        for thing, template in chart.pod_templates(things):
            for index in range(thing["spec"].get("replicas", 1)):
                name = thing["metadata"]["name"] + ("" if thing["kind"] == "Pod" else f"-{index}")
                self.pods.append(Pod(name, 10 + len(self.pods), index, template))
        for thing in (t for t in things if t["kind"] == "Service"):
            behind = [p for p in self.pods if thing["spec"]["selector"].items() <= p.labels.items()]
            base = f"{thing['metadata']['name']}.{chart.NAMESPACE}.svc"
            services[base] = behind[0].ip
            if thing["spec"].get("clusterIP") == "None":
                services.update({f"{pod.name}.{base}": pod.ip for pod in behind})
        for name, component in (names or {}).items():
            services[name] = self.pod(component).ip
        self.endpoint, self.proof = "http://127.0.0.1:7600", {}
        self.secure = any(thing["kind"] == "Certificate" for thing in things)
        if self.secure:
            secrets = self.folder / "secrets"
            secrets.mkdir()
            issue(things, secrets)
            admin = secrets / "demo-omni-admin-tls"
            self.use_certificate("demo-omni-router.pictures.svc", admin / "ca.crt", admin / "tls.crt", admin / "tls.key")
        self.hosts = "".join(f"{ip} {name}\n" for name, ip in services.items())

    def use_certificate(self, host, *files):
        """omnictl reaches the router by this name, with these files: authority, certificate, key."""
        self.endpoint = f"https://{host}:7600"
        self.proof = {f"OMNI_TLS_{key}": str(file) for key, file in zip(("CA", "CERT", "KEY"), files, strict=True)}

    def build(self):
        """Namespaces, addresses, names and firewalls."""
        bridge = f"{PREFIX}-b"
        run("ip", "netns", "add", bridge)
        run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "br0", "up")
        for pod in self.pods:
            run("ip", "netns", "add", pod.namespace)
            port = f"v{pod.ip.rsplit('.', 1)[1]}"
            run("ip", "-n", bridge, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pod.namespace)
            run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", pod.namespace, "addr", "add", f"{pod.ip}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", pod.namespace, "link", "set", device, "up")
            etc = pathlib.Path("/etc/netns") / pod.namespace
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("127.0.0.1 localhost\n" + self.hosts)
            run("ip", "netns", "exec", pod.namespace, "nft", "-f", "-", input=self.firewall(pod))

    def firewall(self, pod):
        """What the network policies let into and out of a pod, as rules of nftables."""
        if not any(thing["kind"] == "NetworkPolicy" for thing in self.things):
            return ""
        rules = {"input": [], "output": []}
        for other in self.pods:
            ports = [str(port) for port in PORTS]
            ranges = [(range_, port) for range_, port in [(p, int(p)) for p in ports] + [(f"{UCX[0]}-{UCX[1]}", UCX[0])]]
            for text, port in ranges:
                if other is pod or allowed(self.things, other.as_peer(), pod.as_peer(), port):
                    rules["input"].append(f"ip saddr {other.ip} tcp dport {text} accept")
                if other is pod or allowed(self.things, pod.as_peer(), other.as_peer(), port):
                    rules["output"].append(f"ip daddr {other.ip} tcp dport {text} accept")
        text = "table inet pods {\n"
        for side, device in (("input", "iifname"), ("output", "oifname")):
            text += f"chain {side} {{ type filter hook {side} priority 0; policy drop;\n"
            text += "ct state established,related accept\n" + f'{device} "lo" accept\n' + "\n".join(rules[side]) + "\n}\n"
        return text + "}\n"

    def start(self):
        """The containers of everything but the test pod."""
        for pod in self.pods:
            for container in chart.containers(pod.template):
                if container["name"] != "generate":
                    self.spawn(pod, container)

    def spawn(self, pod, container):
        log = self.folder / f"{pod.name}.{container['name']}.log"
        program = ["etcd"] if container["name"] == "etcd" else [binary("omni"), *container["args"]]
        command = ["ip", "netns", "exec", pod.namespace, *program]
        with log.open("a") as out:
            pod.processes.append(subprocess.Popen(command, env=pod.environment(container, self.folder), stdin=subprocess.DEVNULL,
                                                  stdout=out, stderr=subprocess.STDOUT))

    def pod(self, component):
        return next(p for p in self.pods if p.labels["app.kubernetes.io/component"] == component)

    def omnictl(self, component, *arguments, timeout=30):
        return subprocess.run(["ip", "netns", "exec", self.pod(component).namespace, binary("omnictl"), *arguments],
                              capture_output=True, text=True, timeout=timeout, check=False, env=os.environ | self.proof)

    def status(self, component, port, path, secret=None):
        """The HTTP status of a path of a pod's own admin port, over TLS without a look at its certificate, as a kubelet asks; with
        a secret it shows that certificate."""
        pod = self.pod(component)
        files = [str(self.folder / "secrets" / secret / name) for name in ("tls.crt", "tls.key")] if secret else []
        return int(run("ip", "netns", "exec", pod.namespace, sys.executable, "-c", ASK, pod.ip, port, path, *files))

    def wait(self):
        """Until every container is a ready member."""
        processes = [p for pod in self.pods for p in pod.processes]
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if any(process.poll() is not None for process in processes):
                break
            done = self.omnictl("router", "get", "members", "-o", "json", "--endpoint", self.endpoint)
            if done.returncode == 0:
                text = done.stdout
                members = json.loads(text)
                members = members["members"] if isinstance(members, dict) else members
                if len(members) == len(processes) - self.etcds and "STARTING" not in text.upper():
                    return members
            time.sleep(0.3)
        raise AssertionError("the members did not come together\n" + self.logs())

    def logs(self):
        return "".join(f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:]) + "\n"
                       for path in sorted(self.folder.glob("*.log")))

    def end(self, pod):
        """Ends a pod as the kubelet does: its containers, then its sidecars. Their exit codes."""
        codes = []
        for process in reversed(pod.processes):  # sidecars are started first
            process.send_signal(signal.SIGTERM)
            codes.append(process.wait(STOP_SECONDS))
        pod.processes = []
        return codes

    def stop(self):
        """Ends the processes and takes the namespaces away; what does not end in time is killed. Our exit codes."""
        etcds = [pod for pod in self.pods if pod.labels["app.kubernetes.io/component"] == "etcd"]
        ours = [p for pod in self.pods if pod not in etcds for p in pod.processes]
        # etcd last: members say goodbye to it.
        for processes in (ours, [p for pod in etcds for p in pod.processes]):
            for process in processes:
                process.send_signal(signal.SIGTERM)
            until = time.monotonic() + STOP_SECONDS
            for process in processes:
                try:
                    process.wait(max(0.1, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for name in [pod.namespace for pod in self.pods] + [f"{PREFIX}-b"]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            etc = pathlib.Path("/etc/netns") / name
            (etc / "hosts").unlink(missing_ok=True)
            if etc.exists():
                etc.rmdir()
        return [process.returncode for process in ours]


def binary(name):
    """Path of a built binary."""
    return str(pathlib.Path(os.environ["OMNI_BIN_DIR"]) / name)


@unittest.skipUnless(os.geteuid() == 0, "network namespaces need root")
class Wiring(unittest.TestCase):
    def make_an_image(self, *more):
        things = chart.objects(chart.template(chart.CHART, chart.HERE / "sets" / "minimal.yaml", *more))
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(things, folder)
            try:
                cluster.build()
                cluster.start()
                members = cluster.wait()
                (container,) = cluster.pod("test").template["spec"]["containers"]
                image = pathlib.Path(folder) / "out.png"
                arguments = [f"--output={image}" if a.startswith("--output=") else a for a in container["args"]]
                done = cluster.omnictl("test", *arguments, timeout=IMAGE_SECONDS)
                self.assertEqual(done.returncode, 0, done.stderr + cluster.logs())
                self.assertEqual(image.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
                denied = cluster.omnictl("test", "version", "--endpoint", f"{'https' if cluster.secure else 'http'}://{cluster.pod('ar').ip}:7602")
                self.assertEqual(denied.returncode, 69, "the firewall lets the test pod reach a stage")
                if cluster.secure:
                    self.admin_ports_are_closed(cluster)
            finally:
                codes = cluster.stop()
            self.assertEqual(set(codes), {0}, "exit codes")
            return members

    def admin_ports_are_closed(self, cluster):
        """Probes are for the kubelet, metrics for who has the monitor's certificate."""
        for component, port, holder in [("router", 9600, "router"), ("ar", 9601, "ar"), ("ar", 9602, "ar"), ("dit", 9603, "dit")]:
            for path, secret, status in [("/livez", None, 200), ("/readyz", None, 200), ("/metrics", None, 401),
                                         ("/metrics", f"demo-omni-{holder}-tls", 403), ("/metrics", "demo-omni-monitor-tls", 200)]:
                with self.subTest(component=component, port=port, path=path, secret=secret):
                    self.assertEqual(cluster.status(component, port, path, secret), status)

    def test_pods_with_certificates_make_an_image_and_their_admin_ports_ask_for_one(self):
        tls = "tls.mode=certManager,tls.certManager.issuer.name=ca"
        self.assertEqual(len(self.make_an_image("--set", tls)), 4)

    def test_the_default_pods_make_an_image(self):
        self.assertEqual(len(self.make_an_image()), 4)

    def test_several_routers_over_the_chart_s_etcd_make_an_image(self):
        etcd = "registry.kind=etcd,registry.etcd.install=true,registry.etcd.replicas=1,router.replicas=2"
        self.assertEqual(len(self.make_an_image("--set", etcd)), 5)

    def test_pools_with_a_plan_make_an_image(self):
        pools = ("pools[0].name=ar,pools[0].role=ar,pools[0].plan.tp=2,pools[1].name=dit,pools[1].role=dit,"
                 "pools[1].plan.cfg=2")
        self.assertEqual(len(self.make_an_image("--set", pools)), 4)

    def test_pools_that_publish_into_a_kv_pool_make_an_image(self):
        pools = ("pools[0].name=kv,pools[0].role=kv,pools[0].replicas=2,"
                 "pools[1].name=ar,pools[1].role=ar,pools[1].replicas=2,pools[1].kvPool=kv,"
                 "pools[2].name=dit,pools[2].role=dit,transfer.poolBytes=64MiB")
        self.assertEqual(len(self.make_an_image("--set", pools)), 6)


if __name__ == "__main__":
    unittest.main()
