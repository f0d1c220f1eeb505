"""The files of deploy/: a compose file and units that start what makes an image, images that run as nobody."""

import configparser
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

import yaml

import chart
from test_wiring import IMAGE_SECONDS, MODEL, Cluster, binary

DEPLOY = chart.HERE.parent
ROLES = ["router", "kv-transfer", "ar-stage", "dit-worker"]
PROMPT = "a red circle left of a blue square on a white background"


def compose():
    """The compose file."""
    return yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())


def with_tls():
    """Services of the compose file with tls.yaml laid over it: environments are merged, volumes by where they go."""
    services, over = compose()["services"], yaml.safe_load((DEPLOY / "compose" / "tls.yaml").read_text())["services"]
    for name, more in over.items():
        service = services[name]
        volumes = service.get("volumes", []) + more.get("volumes", [])
        service |= {key: value for key, value in more.items() if key not in ("environment", "volumes")}
        service["environment"] = service.get("environment", {}) | more.get("environment", {})
        service["volumes"] = list({volume.rsplit(":", 2)[1]: volume for volume in volumes}.values())
    return services


def as_things(services):
    """Services of our image as the workloads that test_wiring runs; variables take their defaults."""
    for name, service in services.items():
        env = [{"name": key, "value": re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value)} for key, value in service["environment"].items()]
        container = {"name": name, "args": service["command"], "env": env}
        template = {"metadata": {"labels": {"app.kubernetes.io/component": name}}, "spec": {"containers": [container]}}
        yield {"kind": "Deployment", "metadata": {"name": name}, "spec": {"template": template}}


@unittest.skipUnless(os.geteuid() == 0, "network namespaces need root")
class Running(unittest.TestCase):
    def image_from(self, cluster, component, folder):
        """Starts the processes and lets one of the namespaces ask for an image."""
        image = pathlib.Path(folder) / "out.png"
        try:
            cluster.build()
            cluster.start()
            cluster.wait()
            done = cluster.omnictl(component, "generate", PROMPT, "--steps", "4", "--endpoint", cluster.endpoint,
                                   "--output", str(image), timeout=IMAGE_SECONDS)
            self.assertEqual(done.returncode, 0, done.stderr + cluster.logs())
            self.assertEqual(image.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        finally:
            codes = cluster.stop()
        self.assertEqual(set(codes), {0}, "exit codes")

    def test_the_services_of_the_compose_file_make_an_image(self):
        services = {name: service for name, service in compose()["services"].items() if name in ROLES}
        self.assertEqual(list(services), ROLES)
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(list(as_things(services)), folder, {name: name for name in services})
            self.image_from(cluster, "router", folder)

    def test_the_services_with_tls_make_an_image(self):
        services = {name: service for name, service in with_tls().items() if name in ROLES}
        with tempfile.TemporaryDirectory() as folder:
            certs = pathlib.Path(folder) / "certs"
            # The command of the file's head.
            told = re.search(r"(?m)^#   omni certs \$certs (.*)$", (DEPLOY / "compose" / "tls.yaml").read_text())
            subprocess.run([binary("omni"), "certs", certs, *told.group(1).split()], check=True, capture_output=True)
            for service in services.values():
                for key, value in service["environment"].items():
                    service["environment"][key] = value.replace("/certs/", f"{certs}/")
            cluster = Cluster(list(as_things(services)), folder, {name: name for name in services})
            cluster.use_certificate("router", certs / "ca.pem", certs / "admin.pem", certs / "admin.key")
            self.image_from(cluster, "router", folder)

    def test_the_units_settings_make_an_image_over_shared_memory(self):
        with tempfile.TemporaryDirectory() as folder:
            settings = pathlib.Path(folder) / "omni.toml"
            text = (DEPLOY / "systemd" / "omni.toml").read_text()
            self.assertEqual(text.count("/var/lib/omni/model"), 2)
            settings.write_text(text.replace("/var/lib/omni/model", str(MODEL)).replace("2GiB", "64MiB"))
            # All roles in one namespace, as on one machine.
            containers = [{"name": role, "args": [role, "--config", str(settings)]} for role in ROLES]
            template = {"metadata": {"labels": {"app.kubernetes.io/component": "router"}}, "spec": {"containers": containers}}
            thing = {"kind": "Deployment", "metadata": {"name": "machine"}, "spec": {"template": template}}
            cluster = Cluster([thing], folder)
            self.image_from(cluster, "router", folder)


class Files(unittest.TestCase):
    def test_images_run_as_nobody_from_pinned_bases_and_carry_the_licences(self):
        paths = sorted((DEPLOY / "containers").glob("Containerfile*"))
        self.assertEqual(len(paths), 2)
        for path in paths:
            text = path.read_text()
            with self.subTest(file=path.name):
                bases = re.findall(r"(?m)^ARG \w+_IMAGE=(\S+)$", text)
                self.assertGreaterEqual(len(bases), 2)
                for base in bases:
                    self.assertRegex(base, r"^[a-z.]+/\S+:[\w.-]+@sha256:[0-9a-f]{64}$")
                for base in re.findall(r"(?m)^FROM (\S+)", text):
                    self.assertRegex(base, r"^\$\{\w+_IMAGE\}$")
                final = text[text.rindex("\nFROM "):]
                self.assertIn("\nUSER 65532:65532\n", final)
                self.assertIn('ENTRYPOINT ["/usr/local/bin/omni"]', final)
                self.assertIn("/out/omni /out/omnictl /usr/local/bin/", final)
                self.assertIn("LICENSE-UCX /out/licenses/UCX_LICENSE", text)
                self.assertIn("--from=build /out/licenses", final)
                self.assertIn("LABEL org.opencontainers.image.title=omni org.opencontainers.image.licenses=", final)
                # What the final image has of the build is copied by name; nothing is run there but a link.
                self.assertLessEqual(set(re.findall(r"(?m)^RUN (\w+)", final)), {"ln"})
                for word in ("ADD", "VOLUME", "EXPOSE", "--privileged", "curl", "latest"):
                    self.assertNotIn(word, text)

    @unittest.skipUnless((DEPLOY.parent / ".git").exists(), "no checkout, so no revision")
    def test_the_images_are_built_by_whichever_builder_there_is_with_their_version_and_revision(self):
        with tempfile.TemporaryDirectory() as folder:
            engine = pathlib.Path(folder) / "engine"
            engine.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
            engine.chmod(0o755)
            for kind, suffix in ([], ""), (["cuda"], "-cuda"):
                done = subprocess.run(["bash", DEPLOY / "containers" / "build.sh", *kind], capture_output=True, text=True,
                                      check=True, env=os.environ | {"ENGINE": str(engine)})
                said = done.stdout.splitlines()
                self.assertEqual(said[0], "build")
                version = re.search(r'(?m)^version = "(.*)"$', (DEPLOY.parent / "Cargo.toml").read_text()).group(1)
                self.assertIn(f"omni:{version}{suffix}", said)
                self.assertIn(f"org.opencontainers.image.version={version}", said)
                self.assertTrue(any(re.fullmatch(r"org\.opencontainers\.image\.revision=[0-9a-f]{40}", line) for line in said))
                self.assertTrue(any(line.startswith("GIT_SHA=") and len(line) == 20 for line in said))
            refused = subprocess.run(["bash", DEPLOY / "containers" / "build.sh", "gpu"], capture_output=True, check=False)
            self.assertNotEqual(refused.returncode, 0)

    def test_every_container_of_the_compose_file_is_locked_down(self):
        for name, service in compose()["services"].items():
            with self.subTest(service=name):
                self.assertRegex(service["image"], r":(v?\d|\$\{?|-omni)|omni:\d")
                for port in service.get("ports", []):
                    self.assertTrue(port.startswith("127.0.0.1:"), port)
                if name in ROLES:
                    self.assertTrue(service["read_only"])
                    self.assertEqual((service["user"], service["cap_drop"]), ("65532:65532", ["ALL"]))
                for volume in service.get("volumes", []):
                    self.assertTrue(volume.endswith(":ro"), volume)
                    source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
                    self.assertTrue((DEPLOY / "compose" / source).exists(), source)

    def test_prometheus_scrapes_the_admin_port_of_every_role(self):
        services = compose()["services"]
        expected = {f"{role}:{services[role]['environment']['OMNI_ADMIN_LISTEN'].rsplit(':', 1)[1]}" for role in ROLES}
        for name, scheme in (("prometheus.yaml", "http"), ("prometheus-tls.yaml", "https")):
            (config,) = yaml.safe_load((DEPLOY / "compose" / name).read_text())["scrape_configs"]
            self.assertEqual({t for entry in config["static_configs"] for t in entry["targets"]}, expected)
            self.assertEqual(config.get("scheme", "http"), scheme)

    def test_with_tls_no_service_speaks_in_clear_and_each_has_its_own_key_alone(self):
        for name, service in with_tls().items():
            with self.subTest(service=name):
                own = [f"{name}.pem", f"{name}.key"] if name in ROLES else []
                files = [volume.rsplit(":", 2)[1] for volume in service.get("volumes", []) if ":/certs/" in volume]
                self.assertEqual(files, [f"/certs/{file}" for file in ["ca.pem", *own]] if name != "grafana" else [])
                environment = service.get("environment", {})
                self.assertNotIn("http://", " ".join(environment.values()))
                if name in ROLES:
                    self.assertEqual((environment["OMNI_TLS"], environment["OMNI_ADMIN_TLS"]), ("on", "on"))
                    self.assertLessEqual({environment["OMNI_TLS_CERT"], environment["OMNI_TLS_KEY"]}, set(files))

    def test_the_unit_runs_a_role_as_its_own_user_without_rights(self):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str
        unit.read(DEPLOY / "systemd" / "omni@.service")
        service = unit["Service"]
        self.assertEqual(service["User"], "omni")
        self.assertRegex((DEPLOY / "systemd" / "omni.sysusers").read_text(), r"(?m)^u omni ")
        self.assertEqual(service["ExecStart"], "/usr/bin/omni %i --config /etc/omni/omni.toml")
        self.assertEqual((service["NoNewPrivileges"], service["CapabilityBoundingSet"]), ("yes", ""))
        self.assertGreater(int(service["TimeoutStopSec"]), 30)
        self.assertIn("64", service["RestartPreventExitStatus"].split())

    def test_scripts_are_sound(self):
        for path in [*DEPLOY.glob("*.sh"), *DEPLOY.glob("*/*.sh")]:
            with self.subTest(script=path.name):
                subprocess.run(["bash", "-n", path], check=True)


if __name__ == "__main__":
    unittest.main()
