//! How fast two ranks move bytes: `threads`, and `ucx` between two processes.
//!
//! ```sh
//! cargo run --release -p ranks --example collective-rates
//! ```
//!
//! Prints one JSON line a backend, transport, operation and size. MB/s is the payload that one rank
//! sends in a second.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "it measures"
)]

use std::{
    env,
    error::Error,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use parallel::{AxisSet, Collective, Mesh, Op, ParallelError, collective::threads, wire};
use ranks::{FileRendezvous, JoinOptions, Transport, UcxWorld};

const PATIENT: Duration = Duration::from_secs(60);
const RANKS: usize = 2;
/// Buffer lengths, in elements of four bytes.
const ELEMENTS: [usize; 3] = [1 << 10, 1 << 18, 1 << 22];
/// Payload that a measurement moves, about, and operations it makes at least and at most.
const ENOUGH: usize = 64 << 20;
const ROUNDS: (usize, usize) = (8, 1000);

fn run(g: &dyn Collective, op: Op, data: Vec<f32>) -> Result<Vec<f32>, ParallelError> {
    match op {
        Op::AllReduce => g.all_reduce(data)?.wait(),
        _ => g.all_to_all(data)?.wait(),
    }
}

fn measure(g: &dyn Collective, name: &str) -> Result<(), ParallelError> {
    for op in [Op::AllReduce, Op::AllToAll] {
        for elements in ELEMENTS {
            let rounds = (ENOUGH / (4 * elements)).clamp(ROUNDS.0, ROUNDS.1);
            let mut data = run(g, op, vec![0.5; elements])?;
            g.barrier()?.wait()?;
            let start = Instant::now();
            for _ in 0..rounds {
                data = run(g, op, data)?;
            }
            let seconds = start.elapsed().as_secs_f64();
            if g.index() == 0 {
                let sent = wire::moved(op, RANKS, 0, elements).sent as f64 * rounds as f64;
                println!(
                    "{{\"backend\":\"{name}\",\"op\":\"{op}\",\"bytes\":{},\"us\":{:.1},\"MB_s\":{:.1}}}",
                    4 * elements,
                    seconds * 1e6 / rounds as f64,
                    sent / seconds / 1e6,
                );
            }
        }
    }
    g.barrier()?.wait()
}

fn rank(rank: usize, transport: Transport, directory: &str) -> Result<(), ParallelError> {
    let options = JoinOptions {
        interface: (transport == Transport::Tcp).then(|| "lo".into()),
        ..JoinOptions::new(transport, PATIENT, Instant::now)
    };
    let mesh = Mesh::new([1, 1, 1, 1, RANKS])?;
    let meeting = FileRendezvous::new(directory, Instant::now);
    let world = UcxWorld::join(mesh, rank, &options, &meeting)?;
    measure(&world.group(AxisSet::ALL)?, &format!("ucx {transport}"))
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().collect();
    if let [_, number, transport, directory] = arguments.as_slice() {
        return Ok(rank(number.parse()?, transport.parse()?, directory)?);
    }
    let ranks: Vec<_> = threads::group(RANKS, PATIENT)?
        .into_iter()
        .map(|end| thread::spawn(move || measure(&end, "threads")))
        .collect();
    for rank in ranks {
        rank.join().map_err(|_| "a rank panicked")??;
    }
    for transport in [Transport::Shm, Transport::Tcp] {
        let directory = tempfile::tempdir()?;
        let mut processes = Vec::new();
        for number in 0..RANKS {
            let process = Command::new(env::current_exe()?)
                .args([&number.to_string(), &transport.to_string()])
                .arg(directory.path())
                .spawn()?;
            processes.push(process);
        }
        for mut process in processes {
            if !process.wait()?.success() {
                return Err("a rank failed".into());
            }
        }
    }
    Ok(())
}
