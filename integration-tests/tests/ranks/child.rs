//! What one rank does, in a process of its own.

use std::{env, path::PathBuf, thread, time::Duration};

use base::clock;
use parallel::{AxisSet, Collective, Mesh, ParallelError, conformance};
use ranks::{FileRendezvous, JoinOptions, Transport, UcxGroup, UcxWorld};

use crate::processes::MARK;

/// Longest wait for another rank where nobody is missing.
const PATIENT: Duration = Duration::from_secs(30);
/// Elements of a long buffer: 16 MiB.
const LONG: usize = 4 << 20;
/// Longest life of a rank, whatever happens to the test that started it.
const LIFE: Duration = Duration::from_secs(120);

fn say(text: impl std::fmt::Display) {
    println!("{MARK}{text}");
}

struct Rank {
    rank: usize,
    size: usize,
    directory: PathBuf,
    transport: Transport,
}

impl Rank {
    fn from_environment() -> Self {
        let get = |name: &str| env::var(format!("OMNI_TEST_{name}")).unwrap();
        Self {
            rank: get("RANK").parse().unwrap(),
            size: get("RANKS").parse().unwrap(),
            directory: get("WORLD").into(),
            transport: get("TRANSPORT").parse().unwrap(),
        }
    }

    /// Joins a world of its own name, and its group of all ranks.
    fn join(&self, name: &str, timeout: Duration) -> (UcxWorld, UcxGroup) {
        let options = JoinOptions {
            interface: (self.transport == Transport::Tcp).then(|| "lo".into()),
            ..JoinOptions::new(self.transport, timeout, clock::now)
        };
        let mesh = Mesh::new([1, 1, 1, 1, self.size]).unwrap();
        let directory = self.directory.join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let meeting = FileRendezvous::new(directory, clock::now);
        let world = UcxWorld::join(mesh, self.rank, &options, &meeting).unwrap();
        let group = world.group(AxisSet::ALL).unwrap();
        (world, group)
    }

    /// Every case of the suite.
    fn suite(&self) {
        let (world, group) = self.join("healthy", PATIENT);
        conformance::healthy(&group).unwrap_or_else(|failure| panic!("{failure}"));
        let peer = (self.rank + 1) % self.size;
        say(world.transports(peer).unwrap().join(","));
        drop((world, group));
        for (at, (name, case)) in conformance::BREAKING.into_iter().enumerate() {
            let absent = name.contains("never comes");
            let timeout = if absent {
                Duration::from_millis(300)
            } else {
                PATIENT
            };
            let (_world, group) = self.join(&format!("breaking-{at}"), timeout);
            case(&group).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        }
        say("done");
    }

    /// One collective after the other, until something goes wrong.
    fn stream(&self, mut step: impl FnMut(&UcxGroup) -> Result<(), ParallelError>) {
        let (_world, group) = self.join("stream", PATIENT);
        step(&group).unwrap();
        say("under way");
        let error = loop {
            if let Err(error) = step(&group) {
                break error;
            }
        };
        say(error);
        // It stays that way.
        let later = group.barrier().unwrap().wait().unwrap_err();
        say(later);
    }

    /// Computes for longer than a rank may be silent.
    fn compute(&self) {
        let (_world, group) = self.join("compute", PATIENT);
        if self.rank == 0 {
            let end = clock::now() + 2 * ranks::limits::DEAD_AFTER;
            while clock::now() < end {
                std::hint::spin_loop();
            }
        }
        let sum = group.all_reduce(vec![1.0]).unwrap().wait().unwrap();
        say(sum[0]);
    }

    /// The last rank aborts in the middle of the others' sum.
    fn abort(&self) {
        let (_world, group) = self.join("abort", PATIENT);
        group.barrier().unwrap().wait().unwrap();
        if self.rank + 1 == self.size {
            thread::sleep(Duration::from_millis(100));
            say("aborting");
            group.abort("out of memory");
        }
        say(group.all_reduce(vec![1.0; 9]).unwrap().wait().unwrap_err());
    }

    /// The last rank goes home early, and the others wait for it.
    fn leave(&self) {
        let (_world, group) = self.join("leave", PATIENT);
        let given = group.all_gather(vec![self.rank as f32; LONG / 4]).unwrap();
        if self.rank + 1 == self.size {
            return;
        }
        thread::sleep(Duration::from_millis(100));
        say(given.wait().unwrap().len() / (LONG / 4));
        say(group.barrier().unwrap().wait().unwrap_err());
    }
}

/// Small sums, gathers and barriers.
fn short(group: &UcxGroup) -> Result<(), ParallelError> {
    let sum = group.all_reduce(vec![1.0; 500])?;
    let all = group.all_gather(vec![1.0; 3])?;
    sum.wait()?;
    all.wait()?;
    group.barrier()?.wait()
}

/// A buffer of 16 MiB that goes around the ring.
fn long() -> impl FnMut(&UcxGroup) -> Result<(), ParallelError> {
    let mut data = vec![1.0; LONG];
    move |group| {
        data = group.ring_shift(1, std::mem::take(&mut data))?.wait()?;
        Ok(())
    }
}

#[test]
#[ignore = "the body of the processes that the other tests start"]
fn a_rank_of_a_world() {
    let rank = Rank::from_environment();
    thread::spawn(|| {
        thread::sleep(LIFE);
        std::process::abort();
    });
    match env::var("OMNI_TEST_WHAT").unwrap().as_str() {
        "suite" => rank.suite(),
        "short" => rank.stream(short),
        "long" => rank.stream(long()),
        "compute" => rank.compute(),
        "abort" => rank.abort(),
        "leave" => rank.leave(),
        other => panic!("{other}?"),
    }
}
