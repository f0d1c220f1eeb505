//! How ranks find each other: each publishes what the others need to connect, and collects theirs.

use std::{
    fs,
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use super::{limits, lock};
use parallel::{MAX_RANKS, ParallelError};

/// How often an answer is looked for.
const POLL: Duration = Duration::from_millis(10);
/// How long one caller may take to say its line.
const CALLER: Duration = Duration::from_secs(2);
/// First bytes of a caller's line.
const MARK: [u8; 8] = *b"omniRV1\n";

/// Brings the ranks of a world together. One rendezvous serves one world, once.
pub trait Rendezvous: std::fmt::Debug {
    /// Makes `blob` known as that of `rank`.
    ///
    /// # Errors
    /// [`ParallelError::Transport`].
    fn publish(&self, rank: usize, blob: &[u8], timeout: Duration) -> Result<(), ParallelError>;

    /// The blobs of all `ranks`, in rank order, once all are known.
    ///
    /// # Errors
    /// [`ParallelError::NotJoined`] naming a missing rank after `timeout`,
    /// [`ParallelError::Transport`].
    fn collect(&self, ranks: usize, timeout: Duration) -> Result<Vec<Vec<u8>>, ParallelError>;
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> ParallelError {
    move |error| ParallelError::Transport {
        what,
        message: error.to_string().into(),
    }
}

/// A directory that every rank can write to; for ranks of one host, or of a shared file system.
///
/// It must be empty: files of an earlier world would be taken for this one's.
#[derive(Debug, Clone)]
pub struct FileRendezvous {
    directory: PathBuf,
    now: fn() -> Instant,
}

impl FileRendezvous {
    /// A rendezvous in `directory`, which exists. `now` gives monotonic time.
    #[must_use]
    pub fn new(directory: impl AsRef<Path>, now: fn() -> Instant) -> Self {
        Self {
            directory: directory.as_ref().to_owned(),
            now,
        }
    }

    fn path(&self, rank: usize) -> PathBuf {
        self.directory.join(format!("rank-{rank}"))
    }
}

impl Rendezvous for FileRendezvous {
    fn publish(&self, rank: usize, blob: &[u8], _: Duration) -> Result<(), ParallelError> {
        let unfinished = self.directory.join(format!("rank-{rank}.unfinished"));
        let write = || {
            fs::write(&unfinished, blob)?;
            // The others see the whole file or none.
            fs::rename(&unfinished, self.path(rank))
        };
        write().map_err(failed("publish an address file"))
    }

    fn collect(&self, ranks: usize, timeout: Duration) -> Result<Vec<Vec<u8>>, ParallelError> {
        let end = (self.now)() + timeout;
        let mut blobs = Vec::with_capacity(ranks);
        while blobs.len() < ranks {
            let rank = blobs.len();
            match fs::read(self.path(rank)) {
                Ok(blob) => blobs.push(blob),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    if (self.now)() >= end {
                        return Err(ParallelError::NotJoined {
                            rank,
                            after: timeout,
                        });
                    }
                    thread::sleep(POLL);
                }
                Err(error) => return Err(failed("read an address file")(error)),
            }
        }
        Ok(blobs)
    }
}

/// Rank 0 listens on an address that all are given; for several hosts. It is neither encrypted nor
/// authenticated: for networks whose every host is trusted.
#[derive(Debug)]
pub struct TcpRendezvous {
    address: SocketAddr,
    now: fn() -> Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Rank 0 alone.
    listener: Option<TcpListener>,
    /// Rank 0's own blob.
    own: Vec<u8>,
    /// The others' connection to rank 0.
    stream: Option<TcpStream>,
}

impl TcpRendezvous {
    /// Rank 0's side: listens on `address`. Port 0 takes a free one; see [`Self::address`].
    ///
    /// # Errors
    /// [`ParallelError::Transport`] when the address cannot be listened on.
    pub fn listen(address: SocketAddr, now: fn() -> Instant) -> Result<Self, ParallelError> {
        let listen = || {
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok((listener, address))
        };
        let (listener, address) = listen().map_err(failed("listen for ranks"))?;
        let state = State {
            listener: Some(listener),
            ..State::default()
        };
        Ok(Self {
            address,
            now,
            state: Mutex::new(state),
        })
    }

    /// The side of every other rank: will call rank 0 at `address`.
    #[must_use]
    pub fn call(address: SocketAddr, now: fn() -> Instant) -> Self {
        Self {
            address,
            now,
            state: Mutex::default(),
        }
    }

    /// The address of rank 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Time left of `timeout` since `start`.
    fn left(&self, start: Instant, timeout: Duration) -> Duration {
        timeout.saturating_sub((self.now)().saturating_duration_since(start))
    }

    /// Takes the lines of all other ranks, then tells everybody everything.
    fn gather(
        &self,
        listener: &TcpListener,
        own: &[u8],
        ranks: usize,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>, ParallelError> {
        let start = (self.now)();
        let mut known: Vec<Option<(Vec<u8>, Option<TcpStream>)>> =
            (0..ranks).map(|_| None).collect();
        known[0] = Some((own.to_vec(), None));
        while let Some(rank) = known.iter().position(Option::is_none) {
            match listener.accept() {
                // A caller that says nothing sensible is hung up on.
                Ok((stream, _)) => {
                    if let Ok((rank, blob)) = take_line(&stream, ranks) {
                        known[rank] = Some((blob, Some(stream)));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.left(start, timeout).is_zero() {
                        let after = timeout;
                        return Err(ParallelError::NotJoined { rank, after });
                    }
                    thread::sleep(POLL);
                }
                Err(error) => return Err(failed("accept a rank")(error)),
            }
        }
        let known: Vec<_> = known.into_iter().flatten().collect();
        let mut table = Vec::new();
        for (blob, _) in &known {
            put(&mut table, blob);
        }
        for mut stream in known.iter().filter_map(|(_, stream)| stream.as_ref()) {
            stream.write_all(&table).map_err(failed("tell a rank"))?;
        }
        Ok(known.into_iter().map(|(blob, _)| blob).collect())
    }
}

impl Rendezvous for TcpRendezvous {
    fn publish(&self, rank: usize, blob: &[u8], timeout: Duration) -> Result<(), ParallelError> {
        let mut state = lock(&self.state);
        if (rank == 0) != state.listener.is_some() {
            return Err(ParallelError::Transport {
                what: "rendezvous",
                message: format!("rank 0 listens and the others call, not so rank {rank}").into(),
            });
        }
        if rank == 0 {
            state.own = blob.to_vec();
            return Ok(());
        }
        let start = (self.now)();
        let stream = loop {
            // A zero timeout is refused; rank 0 may come up only now.
            match TcpStream::connect_timeout(&self.address, CALLER) {
                Ok(stream) => break stream,
                Err(_) if !self.left(start, timeout).is_zero() => thread::sleep(POLL),
                Err(error) => return Err(failed("call rank 0")(error)),
            }
        };
        let mut line = MARK.to_vec();
        line.extend((rank as u32).to_le_bytes());
        put(&mut line, blob);
        let mut writer = &stream;
        writer.write_all(&line).map_err(failed("call rank 0"))?;
        state.stream = Some(stream);
        Ok(())
    }

    fn collect(&self, ranks: usize, timeout: Duration) -> Result<Vec<Vec<u8>>, ParallelError> {
        let mut state = lock(&self.state);
        if let Some(listener) = state.listener.take() {
            return self.gather(&listener, &state.own, ranks, timeout);
        }
        let Some(stream) = state.stream.take() else {
            return Err(ParallelError::Transport {
                what: "rendezvous",
                message: "collected before it was published".into(),
            });
        };
        let read = || {
            stream.set_read_timeout(Some(timeout.max(POLL)))?;
            (0..ranks).map(|_| get(&stream)).collect::<io::Result<_>>()
        };
        read().map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ParallelError::NotJoined {
                rank: 0,
                after: timeout,
            },
            _ => failed("hear from rank 0")(error),
        })
    }
}

fn take_line(stream: &TcpStream, ranks: usize) -> io::Result<(usize, Vec<u8>)> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(CALLER))?;
    stream.set_write_timeout(Some(CALLER))?;
    let (mut mark, mut rank) = ([0; MARK.len()], [0; 4]);
    let mut reader = stream;
    reader.read_exact(&mut mark)?;
    reader.read_exact(&mut rank)?;
    let rank = u32::from_le_bytes(rank) as usize;
    if mark != MARK || rank == 0 || rank >= ranks.min(MAX_RANKS) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((rank, get(stream)?))
}

fn put(out: &mut Vec<u8>, blob: &[u8]) {
    out.extend((blob.len() as u32).to_le_bytes());
    out.extend(blob);
}

fn get(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limits::MAX_ADDRESS_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut blob = vec![0; length];
    stream.read_exact(&mut blob)?;
    Ok(blob)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(30);

    fn blob(rank: usize) -> Vec<u8> {
        vec![rank as u8; rank]
    }

    fn meet(ends: Vec<Box<dyn Rendezvous + Send>>) {
        let ranks = ends.len();
        let threads: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(rank, end)| {
                thread::spawn(move || {
                    end.publish(rank, &blob(rank), LONG).unwrap();
                    end.collect(ranks, LONG).unwrap()
                })
            })
            .collect();
        let expected: Vec<_> = (0..ranks).map(blob).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), expected);
        }
    }

    #[test]
    fn ranks_meet_in_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let end = || Box::new(FileRendezvous::new(&directory, base::clock::now)) as _;
        meet(vec![end(), end(), end()]);
    }

    #[test]
    fn ranks_meet_at_rank_0_whatever_else_calls_there() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let first = TcpRendezvous::listen(any, base::clock::now).unwrap();
        let address = first.address();
        TcpStream::connect(address)
            .unwrap()
            .write_all(b"GET / HTTP/1.1\r\n\r\n")
            .unwrap();
        let call = || Box::new(TcpRendezvous::call(address, base::clock::now)) as _;
        meet(vec![Box::new(first), call(), call()]);
    }

    #[test]
    fn a_rank_that_does_not_join_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let end = FileRendezvous::new(&directory, base::clock::now);
        let after = Duration::from_millis(20);
        end.publish(0, &[], after).unwrap();
        let missing = Err(ParallelError::NotJoined { rank: 1, after });
        assert_eq!(end.collect(2, after), missing);

        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let end = TcpRendezvous::listen(any, base::clock::now).unwrap();
        end.publish(0, &[], after).unwrap();
        assert_eq!(end.collect(2, after), missing);
    }
}
