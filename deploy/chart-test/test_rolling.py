"""A rolling restart of every role, under load, with the pods of the chart as processes; see test_wiring."""

import os
import random
import tempfile
import threading
import time
import unittest

import chart
from test_wiring import IMAGE_SECONDS, Cluster


class Load:
    """Clients that ask for one image after another until they are told to stop."""

    CLIENTS = 2

    def __init__(self, cluster):
        self.cluster, self.going, self.made, self.failed = cluster, True, 0, []
        self.routers = []  # who is behind the service now
        self.threads = [threading.Thread(target=self.ask) for _ in range(self.CLIENTS)]

    def ask(self):
        image = self.cluster.folder / f"{threading.get_ident()}.png"
        while self.going:
            endpoint = f"http://{random.choice(self.routers).ip}:7600"
            done = self.cluster.omnictl("test", "generate", "a red circle", "--steps", "3", "--endpoint", endpoint,
                                        f"--output={image}", "--quiet", timeout=IMAGE_SECONDS)
            self.made += done.returncode == 0
            if done.returncode != 0:
                self.failed.append(done.stderr)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.going = False
        for thread in self.threads:
            thread.join()


@unittest.skipUnless(os.geteuid() == 0, "network namespaces need root")
class Rolling(unittest.TestCase):
    def test_a_rolling_restart_of_every_role_loses_no_request(self):
        values = ("registry.kind=etcd,registry.etcd.install=true,registry.etcd.replicas=1,router.replicas=2,"
                  "poolDefaults.replicas=2,transfer.poolBytes=64MiB")
        things = chart.objects(chart.template(chart.CHART, chart.HERE / "sets" / "minimal.yaml", "--set", values,
                                              "--set", "pools[0].name=ar,pools[0].role=ar,pools[0].settings.threads=1",
                                              "--set", "pools[1].name=dit,pools[1].role=dit,pools[1].settings.threads=1"))
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster(things, folder)
            try:
                cluster.build()
                cluster.start()
                cluster.wait()
                routers = [p for p in cluster.pods if p.labels["app.kubernetes.io/component"] == "router"]
                load = Load(cluster)
                load.routers = routers
                with load:
                    for pod in (p for p in cluster.pods if p.labels["app.kubernetes.io/component"] in ("router", "ar", "dit")):
                        # What Kubernetes does: out of the endpoints, preStop, SIGTERM, and a new pod in its place.
                        load.routers = [router for router in routers if router is not pod]
                        time.sleep(1)
                        codes = cluster.end(pod)
                        self.assertEqual(set(codes), {0}, cluster.logs())
                        for container in chart.containers(pod.template):
                            cluster.spawn(pod, container)
                        cluster.wait()
                        load.routers = routers
                self.assertEqual(load.failed, [], cluster.logs())
                self.assertGreaterEqual(load.made, 6)
            finally:
                cluster.stop()


if __name__ == "__main__":
    unittest.main()
