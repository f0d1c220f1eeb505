//! How a process gets at the bytes of slots: through its own mapping of the pool, or one-sided over UCX.
use std::sync::Arc;

use base::{Deadline, clock::SystemClock};
use fabric::{Access, Transport};
use proto::v1;

use crate::engine::{Engine, EngineConfig, Part, Remote};
use crate::local::{Mapped, Maps};
use crate::{TransferError, limits, wire};

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

    /// Writes `bytes` to the slot from byte `at` on, and gives the transport. When this returns, they are
    /// there.
    ///
    /// # Errors
    /// As [`Engine::put`]; [`TransferError::Invalid`] when they reach past the slot.
    pub async fn write(
        &self,
        place: &Place,
        at: usize,
        bytes: Arc<Vec<u8>>,
        deadline: Deadline,
    ) -> Result<String, TransferError> {
        match place {
            Place::Mapped(slot) => {
                let slot = slot.clone();
                let write = move || write_mapped(&slot, at, &bytes, deadline);
                blocking(write).await?.map(|()| MAPPED.to_owned())
            }
            Place::Remote(remote) => {
                let left = remote.bytes.saturating_sub(at as u64);
                let part = remote.part(at as u64, left);
                let landed = self.engine()?.put(&part, bytes, deadline).await?;
                Ok(landed.transport)
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
    at: usize,
    bytes: &[u8],
    deadline: Deadline,
) -> Result<(), TransferError> {
    for (index, block) in bytes.chunks(limits::VERIFY_BLOCK_BYTES).enumerate() {
        // Memory whose lease may be over is not touched.
        if deadline.is_past(&SystemClock) {
            return Err(TransferError::Deadline {
                what: "writing the payload",
            });
        }
        if !slot.write(at + index * limits::VERIFY_BLOCK_BYTES, block) {
            return Err(TransferError::invalid("bytes", "reach past the slot"));
        }
    }
    Ok(())
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
