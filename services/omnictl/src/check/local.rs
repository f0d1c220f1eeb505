//! What is to be known of this machine, from the files in which Linux says it.
use std::{fs, net::TcpListener, path::Path, time::Duration};

use super::{Finding, failed, ok, skipped};
use crate::delegate;

/// Least shared memory that is worth having, in bytes: the default pool.
const LEAST_SHARED: u64 = 256 << 20;
/// Least files a router may have open at once: its connections.
const LEAST_FILES: u64 = 4096;
/// How long the smallest transfers may take.
const TRANSFER_DEADLINE: Duration = Duration::from_secs(30);

/// Nobody else sits on a port of Omni's.
pub(super) fn port(port: u16, ours: bool) -> Finding {
    const CHECK: &str = "port";
    match TcpListener::bind(("127.0.0.1", port)) {
        Ok(_) => ok(CHECK, format!("{port} is free")),
        Err(_) if ours => ok(CHECK, format!("{port} is taken, a cluster answers here")),
        Err(error) => failed(
            CHECK,
            format!("{port}: {error}"),
            format!("see who has it (ss -ltnp 'sport = :{port}'), or choose another with --listen"),
        ),
    }
}

/// GPUs and their driver.
pub(super) fn gpus(wanted: usize) -> Finding {
    gpus_in(Path::new("/proc/driver/nvidia"), wanted)
}

fn gpus_in(folder: &Path, wanted: usize) -> Finding {
    const CHECK: &str = "GPUs";
    let version = fs::read_to_string(folder.join("version")).unwrap_or_default();
    let driver = version.lines().next().unwrap_or_default();
    let driver = driver
        .split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'));
    let gpus = fs::read_dir(folder.join("gpus"))
        .into_iter()
        .flatten()
        .flatten();
    let mut models: Vec<String> = gpus
        .filter_map(|gpu| fs::read_to_string(gpu.path().join("information")).ok())
        .filter_map(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("Model:"));
            line.map(|model| model.trim().to_owned())
        })
        .collect();
    models.sort();
    let found = match (models.len(), driver) {
        (0, None) => "none, and no driver".to_owned(),
        (0, Some(driver)) => format!("none, driver {driver}"),
        (count, driver) => {
            models.dedup();
            let driver = driver.unwrap_or("unknown");
            format!("{count} ({}), driver {driver}", models.join(", "))
        }
    };
    let there = found
        .split(' ')
        .next()
        .and_then(|count| count.parse().ok())
        .unwrap_or(0);
    match (there, wanted) {
        (0, 0) => skipped(CHECK, format!("{found}: this machine computes on the CPU")),
        (there, wanted) if there < wanted => failed(
            CHECK,
            format!("{found}; {wanted} wanted"),
            "install the driver, or give the container its devices (nvidia-smi -L must list them)",
        ),
        _ => ok(CHECK, found),
    }
}

/// The data plane carries bytes: the smallest prefix over each transport, by the server's own program.
pub(super) async fn transports() -> Finding {
    const CHECK: &str = "UCX transports";
    let program = delegate::omni();
    let arguments = [
        "bench",
        "transfer",
        "--mib",
        "0.0625",
        "--rounds",
        "1",
        "--fan-out",
        "1",
    ];
    let mut command = tokio::process::Command::new(&program);
    command
        .args(arguments)
        .kill_on_drop(true)
        .stdin(std::process::Stdio::null());
    match tokio::time::timeout(TRANSFER_DEADLINE, command.output()).await {
        Err(_) => failed(
            CHECK,
            format!("nothing came over within {TRANSFER_DEADLINE:?}"),
            format!("run {} bench transfer by hand", program.display()),
        ),
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            skipped(CHECK, "omni is not installed here; OMNI_BIN names it")
        }
        Ok(Err(error)) => skipped(CHECK, format!("{}: {error}", program.display())),
        Ok(Ok(output)) if output.status.success() => ok(CHECK, "shm and tcp carry a prefix"),
        Ok(Ok(output)) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().last().unwrap_or("it said nothing").to_owned();
            let hint = "an interface must be up for tcp, /dev/shm mounted for shm";
            failed(CHECK, last, hint)
        }
    }
}

/// Room in /dev/shm for a pool.
pub(super) fn shared_memory() -> Finding {
    const CHECK: &str = "shared memory";
    let Ok(about) = rustix::fs::statvfs("/dev/shm") else {
        let hint = "mount a tmpfs there; in a container, give it an emptyDir of medium Memory";
        return failed(CHECK, "/dev/shm is not there", hint);
    };
    let free = about.f_bavail.saturating_mul(about.f_frsize);
    let found = format!("{} MiB free in /dev/shm", free >> 20);
    if free < LEAST_SHARED {
        let hint = format!(
            "pools live there: at least {} MiB, or what --pool-bytes says",
            LEAST_SHARED >> 20
        );
        return failed(CHECK, found, hint);
    }
    ok(CHECK, found)
}

/// Ports of InfiniBand or RoCE.
pub(super) fn rdma(wanted: bool) -> Finding {
    rdma_in(Path::new("/sys/class/infiniband"), wanted)
}

fn rdma_in(folder: &Path, wanted: bool) -> Finding {
    const CHECK: &str = "RDMA";
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    let mut ports = vec![];
    for device in entries(folder) {
        for port in entries(&device.path().join("ports")) {
            let state = fs::read_to_string(port.path().join("state")).unwrap_or_default();
            let name = format!(
                "{}:{}",
                device.file_name().to_string_lossy(),
                port.file_name().to_string_lossy()
            );
            ports.push((name, state.contains("ACTIVE")));
        }
    }
    ports.sort();
    let up: Vec<_> = ports
        .iter()
        .filter(|(_, up)| *up)
        .map(|(name, _)| name.as_str())
        .collect();
    match (up.is_empty(), ports.is_empty(), wanted) {
        (false, ..) => ok(
            CHECK,
            format!(
                "{} up of {} ports: {}",
                up.len(),
                ports.len(),
                up.join(", ")
            ),
        ),
        (true, true, false) => skipped(CHECK, "no device: prefixes of other nodes come over tcp"),
        (true, true, true) => failed(
            CHECK,
            "no device",
            "load the driver, or ask the cluster for its resource (values: rdma.resourceName)",
        ),
        (true, false, _) => failed(
            CHECK,
            format!("none of {} ports is up", ports.len()),
            "look at the cable and the switch (ibstat), and at the subnet manager",
        ),
    }
}

/// A limit of this process, in its file's words.
fn limit(name: &str) -> Option<(String, Option<u64>)> {
    let text = fs::read_to_string("/proc/self/limits").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let soft = line.split_whitespace().next()?.to_owned();
    let number = soft.parse().ok();
    Some((soft, number))
}

/// Registered memory of RDMA is pinned.
pub(super) fn pinned_memory(wanted: bool) -> Finding {
    const CHECK: &str = "pinned memory";
    match limit("Max locked memory") {
        _ if !wanted => skipped(CHECK, "of matter with RDMA alone"),
        Some((_, None)) => ok(CHECK, "unlimited"),
        Some((soft, Some(_))) => failed(
            CHECK,
            format!("{soft} bytes"),
            "ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, or the capability IPC_LOCK",
        ),
        None => skipped(CHECK, "the system does not say"),
    }
}

/// Every connection is a file.
pub(super) fn open_files() -> Finding {
    const CHECK: &str = "open files";
    match limit("Max open files") {
        Some((soft, Some(number))) if number < LEAST_FILES => failed(
            CHECK,
            format!("{soft} at once"),
            format!(
                "a router with many clients needs {LEAST_FILES}: ulimit -n, or LimitNOFILE in the unit"
            ),
        ),
        Some((soft, _)) => ok(CHECK, format!("{soft} at once")),
        None => skipped(CHECK, "the system does not say"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Outcome;

    #[test]
    fn a_port_that_somebody_else_has_is_a_failure_unless_it_is_ours() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let number = taken.local_addr().unwrap().port();
        let found = port(number, false);
        assert_eq!(found.outcome, Outcome::Failed);
        assert!(found.hint.contains(&number.to_string()));
        assert_eq!(port(number, true).outcome, Outcome::Ok);
    }

    #[test]
    fn gpus_are_counted_and_too_few_are_a_failure() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(gpus_in(dir.path(), 0).outcome, Outcome::Skipped);
        assert_eq!(gpus_in(dir.path(), 1).outcome, Outcome::Failed);
        fs::write(
            dir.path().join("version"),
            "NVRM version: NVIDIA UNIX  580.65.06  Sun\n",
        )
        .unwrap();
        for bus in ["0", "1"] {
            let folder = dir.path().join("gpus").join(bus);
            fs::create_dir_all(&folder).unwrap();
            fs::write(
                folder.join("information"),
                "Model: \t\t NVIDIA H200\nIRQ: 1\n",
            )
            .unwrap();
        }
        let found = gpus_in(dir.path(), 2);
        assert_eq!(
            (found.outcome, found.found.as_str()),
            (Outcome::Ok, "2 (NVIDIA H200), driver 580.65.06")
        );
        assert_eq!(gpus_in(dir.path(), 3).outcome, Outcome::Failed);
    }

    #[test]
    fn rdma_is_what_is_up_and_its_absence_fails_only_where_it_is_wanted() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(rdma_in(dir.path(), false).outcome, Outcome::Skipped);
        assert_eq!(rdma_in(dir.path(), true).outcome, Outcome::Failed);
        let port = dir.path().join("mlx5_0/ports/1");
        fs::create_dir_all(&port).unwrap();
        fs::write(port.join("state"), "1: DOWN\n").unwrap();
        assert_eq!(rdma_in(dir.path(), false).outcome, Outcome::Failed);
        fs::write(port.join("state"), "4: ACTIVE\n").unwrap();
        let found = rdma_in(dir.path(), true);
        assert_eq!(
            (found.outcome, found.found.as_str()),
            (Outcome::Ok, "1 up of 1 ports: mlx5_0:1")
        );
    }
}
