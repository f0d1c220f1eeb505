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
from test_wiring import IMAGE_SECONDS, MODEL, Cluster

DEPLOY = chart.HERE.parent
ROLES = ["router", "kv-transfer", "ar-stage", "dit-worker"]
PROMPT = "a red circle left of a blue square on a white background"


def compose():
    """The compose file."""
    return yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())


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
            done = cluster.omnictl(component, "generate", PROMPT, "--steps", "4", "--endpoint", "http://127.0.0.1:7600",
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
        config = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())
        targets = {t for entry in config["scrape_configs"][0]["static_configs"] for t in entry["targets"]}
        services = compose()["services"]
        expected = {f"{role}:{services[role]['environment']['OMNI_ADMIN_LISTEN'].rsplit(':', 1)[1]}" for role in ROLES}
        self.assertEqual(targets, expected)

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
