use std::collections::HashMap;
use std::io::{self, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use base::Deadline;
use fabric::{Access, SharedMemory, Store};
use proto::v1;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::{GIVE_BYTES, POOL_ID_BYTES, PoolId, address, given, question};
use crate::{TransferError, limits};

/// A slot in the address space of this process.
#[derive(Debug, Clone)]
pub struct Mapped {
    memory: Arc<SharedMemory>,
    offset: usize,
    bytes: usize,
}

impl Mapped {
    /// Bytes of the slot.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `[at, at + out.len())` of the slot out. False, with `out` untouched, when that reaches past
    /// the end.
    #[must_use]
    pub fn read(&self, at: usize, out: &mut [u8]) -> bool {
        self.holds(at, out.len()) && self.memory.read(self.offset + at, out)
    }

    /// Copies `bytes` to `[at, at + bytes.len())` of the slot. False, with nothing written, when that
    /// reaches past the end or the slot is only read here.
    #[must_use]
    pub fn write(&self, at: usize, bytes: &[u8]) -> bool {
        self.holds(at, bytes.len()) && self.memory.write(self.offset + at, bytes)
    }

    /// As [`Self::read`], and gives the CRC32C of what was copied; `None` where that gives false.
    #[must_use]
    pub fn read_crc32c(&self, at: usize, out: &mut [u8], store: Store) -> Option<u32> {
        let inside = self.holds(at, out.len());
        inside.then(|| self.memory.read_crc32c(self.offset + at, out, (0, store)))?
    }

    /// As [`Self::write`], and gives the CRC32C of what has the checksum `crc` and `bytes` behind it; `None` where
    /// that gives false.
    #[must_use]
    pub fn write_crc32c(&self, at: usize, bytes: &[u8], crc: u32) -> Option<u32> {
        let inside = self.holds(at, bytes.len());
        inside.then(|| self.memory.write_crc32c(self.offset + at, bytes, crc))?
    }

    fn holds(&self, at: usize, len: usize) -> bool {
        at.checked_add(len).is_some_and(|end| end <= self.bytes)
    }
}

/// Pools that this process has mapped.
#[derive(Debug, Default)]
pub(crate) struct Maps {
    pools: Mutex<HashMap<(PoolId, Access), Arc<SharedMemory>>>,
}

impl Maps {
    /// The slot at `region`, of `bytes` bytes; maps its pool first where needed.
    pub(crate) async fn slot(
        &self,
        region: &v1::LocalRegion,
        bytes: u64,
        access: Access,
        deadline: Deadline,
    ) -> Result<Mapped, TransferError> {
        let wrong = |field, message: &str| Err(TransferError::invalid(field, message.to_owned()));
        let Ok(pool) = PoolId::try_from(region.pool_id.as_slice()) else {
            return wrong("pool_id", &format!("must hold {POOL_ID_BYTES} bytes"));
        };
        let memory = match self.known(pool, access) {
            Some(memory) => memory,
            None => {
                self.open(region.socket.clone(), pool, access, deadline)
                    .await?
            }
        };
        let end = region.offset.checked_add(bytes);
        let inside = end.is_some_and(|end| end <= memory.bytes() as u64);
        match (usize::try_from(region.offset), usize::try_from(bytes)) {
            (Ok(offset), Ok(bytes)) if inside => Ok(Mapped {
                memory,
                offset,
                bytes,
            }),
            _ => wrong("offset", "the slot reaches past the pool"),
        }
    }

    fn known(&self, pool: PoolId, access: Access) -> Option<Arc<SharedMemory>> {
        let pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        pools.get(&(pool, access)).cloned()
    }

    async fn open(
        &self,
        socket: String,
        pool: PoolId,
        access: Access,
        deadline: Deadline,
    ) -> Result<Arc<SharedMemory>, TransferError> {
        let what = "mapping the pool of the node";
        let opened = tokio::task::spawn_blocking(move || fetch(&socket, &pool, access));
        let opened = deadline.bound(what, opened).await;
        let opened = opened.map_err(|_| TransferError::Deadline { what })?;
        let memory = opened.map_err(|_| TransferError::Stopped)?;
        let memory = Arc::new(memory.map_err(|source| TransferError::Io { what, source })?);
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        // A pool that is new here may stand for one that is gone, whose memory lives as long as its maps.
        pools.retain(|_, memory| Arc::strong_count(memory) > 1);
        if pools.len() < limits::MAX_MAPPED_POOLS {
            pools.insert((pool, access), Arc::clone(&memory));
        }
        Ok(memory)
    }
}

/// Asks the door behind `socket` for the pool and maps it.
fn fetch(socket: &str, pool: &PoolId, access: Access) -> io::Result<SharedMemory> {
    let mut stream = UnixStream::connect_addr(&address(socket)?)?;
    stream.set_read_timeout(Some(limits::DOOR_PATIENCE))?;
    stream.set_write_timeout(Some(limits::DOOR_PATIENCE))?;
    stream.write_all(&question(pool, access))?;
    let mut gives = [0; GIVE_BYTES];
    let (read, file) = receive(&stream, &mut gives)?;
    let bytes = given(&gives).filter(|_| read == GIVE_BYTES);
    let (Some(bytes), Some(file)) = (bytes, file) else {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the service did not hand out its pool",
        ));
    };
    let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
    SharedMemory::open(file, bytes, access)
}

fn receive(stream: &UnixStream, into: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(into)];
    let got = recvmsg(stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut file = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut files) = message {
            file = files.next();
        }
    }
    Ok((got.bytes, file))
}
