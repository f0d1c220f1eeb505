//! How a process gets at the bytes of slots: through its own mapping of the pool, or one-sided over UCX.
use std::sync::Arc;

use base::{Deadline, clock::SystemClock};
use fabric::{Access, Transport};
use proto::v1;

use super::sums::Sums;
use crate::engine::{Engine, EngineConfig, Part, Remote};
use crate::local::{Mapped, Maps};
use crate::{TransferError, wire};

/// Name of the way through a mapping, as transfers report it.
pub const MAPPED: &str = "shm";

/// Where the bytes of a slot are.
#[derive(Debug, Clone)]
pub enum Place {
    /// In the address space of this process.
    Mapped(Mapped),
    /// At a peer.
    Remote(Remote),
}

/// The ways that are open to this process. Clones share them.
#[derive(Debug, Clone)]
pub struct Reach {
    maps: Option<Arc<Maps>>,
    engine: Option<Engine>,
}

impl Reach {
    /// Opens what `config` allows.
    ///
    /// # Errors
    /// [`TransferError::Invalid`] for a bad configuration, [`TransferError::Ucx`] when a transport cannot be
    /// opened.
    pub fn open(config: &EngineConfig) -> Result<Self, TransferError> {
        config.settings()?;
        Ok(Self {
            maps: config.maps().then(Arc::default),
            engine: config.remote().map(|c| Engine::start(&c)).transpose()?,
        })
    }

    /// Finds the slot of `bytes` bytes that an answer of its service describes. The mapping is taken where
    /// there is one; which way it was is reported with each transfer.
    ///
    /// # Errors
    /// [`TransferError::NoPath`] when neither way leads there, and what a bad description says.
    pub async fn place(
        &self,
        region: Option<v1::RemoteRegion>,
        local: Option<v1::LocalRegion>,
        (bytes, access): (u64, Access),
        deadline: Deadline,
    ) -> Result<Place, TransferError> {
        let mut why = "the service shares its pool only with other transports".to_owned();
        if let (Some(maps), Some(local)) = (&self.maps, &local) {
            match maps.slot(local, bytes, access, deadline).await {
                Ok(slot) => return Ok(Place::Mapped(slot)),
                // Another node, or no way in: the wire may lead there.
                Err(TransferError::Io { source, .. }) => why = source.to_string(),
                Err(error) => return Err(error),
            }
        }
        match (&self.engine, region) {
            (Some(_), Some(region)) => {
                let remote = wire::region_from_proto(Some(region), bytes)?;
                Ok(Place::Remote(remote))
            }
            _ => Err(TransferError::NoPath { why }),
        }
    }

    /// Writes `bytes` to the slot behind those that `sums` has seen, and gives the transport and the checksums with
    /// these. When this returns, the bytes are there.
    ///
    /// # Errors
    /// As [`Engine::put`]; [`TransferError::Invalid`] when they reach past the slot.
    pub async fn write(
        &self,
        place: &Place,
        mut sums: Sums,
        bytes: Arc<Vec<u8>>,
        deadline: Deadline,
    ) -> Result<(String, Sums), TransferError> {
        match place {
            Place::Mapped(slot) => {
                let slot = slot.clone();
                let write = move || write_mapped(&slot, &mut sums, &bytes, deadline).map(|()| sums);
                Ok((MAPPED.to_owned(), blocking(write).await??))
            }
            Place::Remote(remote) => {
                let at = sums.seen() as u64;
                let left = remote.bytes.saturating_sub(at);
                let part = remote.part(at, left);
                let source = Arc::clone(&bytes);
                let sum = blocking(move || {
                    let sum = |_, block: &[u8], crc| {
                        Ok::<_, TransferError>(kv::crc32c_append(crc, block))
                    };
                    sums.add(&source, sum).map(|()| sums)
                });
                let put = self.engine()?.put(&part, bytes, deadline);
                let (landed, sums) = tokio::join!(put, sum);
                Ok((landed?.transport, sums??))
            }
        }
    }

    /// Reads parts of the slot into `buffer` and gives it back, with the transport.
    ///
    /// # Errors
    /// As [`Engine::get_parts`].
    pub async fn read(
        &self,
        place: &Place,
        buffer: Vec<u8>,
        parts: Vec<Part>,
        deadline: Deadline,
    ) -> Result<(Vec<u8>, String), TransferError> {
        match place {
            Place::Mapped(slot) => {
                let slot = slot.clone();
                blocking(move || read_mapped(&slot, buffer, &parts)).await?
            }
            Place::Remote(remote) => {
                let read = self.engine()?.get_parts(remote, buffer, parts, deadline);
                let (buffer, landed) = read.await?;
                Ok((buffer, landed.transport))
            }
        }
    }

    fn engine(&self) -> Result<&Engine, TransferError> {
        self.engine.as_ref().ok_or(TransferError::Stopped)
    }
}

impl EngineConfig {
    /// Whether pools of this node are mapped.
    pub(crate) fn maps(&self) -> bool {
        self.transports.contains(&Transport::Shm)
    }

    /// The part that UCX serves, if any.
    pub(crate) fn remote(&self) -> Option<Self> {
        let mut remote = self.clone();
        remote.transports.retain(|&t| t != Transport::Shm);
        (!remote.transports.is_empty()).then_some(remote)
    }
}

fn write_mapped(
    slot: &Mapped,
    sums: &mut Sums,
    bytes: &[u8],
    deadline: Deadline,
) -> Result<(), TransferError> {
    sums.add(bytes, |at, block, crc| {
        // Memory whose lease may be over is not touched.
        if deadline.is_past(&SystemClock) {
            return Err(TransferError::Deadline {
                what: "writing the payload",
            });
        }
        let written = slot.write_crc32c(at, block, crc);
        written.ok_or_else(|| TransferError::invalid("bytes", "reach past the slot"))
    })
}

fn read_mapped(
    slot: &Mapped,
    mut buffer: Vec<u8>,
    parts: &[Part],
) -> Result<(Vec<u8>, String), TransferError> {
    for part in parts {
        let from = usize::try_from(part.remote).unwrap_or(usize::MAX);
        let read = buffer
            .get_mut(part.local.clone())
            .is_some_and(|out| slot.read(from, out));
        if !read {
            return Err(TransferError::invalid("bytes", "reach past the slot"));
        }
    }
    Ok((buffer, MAPPED.to_owned()))
}

/// Runs what takes long off the async threads.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TransferError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| TransferError::Stopped)
}
