use std::fs::Permissions;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener as Bound, UnixStream as Plain};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::task::Tracker;
use fabric::SharedMemory;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::{AsyncReadExt as _, Interest};
use tokio::net::{UnixListener, UnixStream};

use super::{ABSTRACT, ASK_BYTES, PoolId, address, answer, asked};
use crate::{TransferError, limits};

/// Hands the pool's memory file to processes of the node.
#[derive(Debug)]
pub(crate) struct Door {
    listener: Bound,
    /// File of the socket, if it is one.
    path: Option<PathBuf>,
    socket: String,
    pool: PoolId,
    memory: Arc<SharedMemory>,
}

impl Door {
    /// Opens the door at `path`, or under an abstract name that only the service's answers tell.
    pub(crate) fn open(
        path: Option<&Path>,
        pool: PoolId,
        memory: &Arc<SharedMemory>,
    ) -> Result<Self, TransferError> {
        let socket = match path {
            Some(path) => path.display().to_string(),
            None => {
                let name: String = pool.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("{ABSTRACT}omni-kv-{name}")
            }
        };
        let failed = |error: io::Error| {
            TransferError::invalid("pool_socket", format!("{socket} cannot be opened: {error}"))
        };
        if let Some(path) = path {
            remove_stale(path).map_err(failed)?;
        }
        let listener = Bound::bind_addr(&address(&socket).map_err(failed)?).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        if let Some(path) = path {
            std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
        }
        Ok(Self {
            listener,
            path: path.map(Path::to_owned),
            socket,
            pool,
            memory: Arc::clone(memory),
        })
    }

    /// Name of the socket, "@" before an abstract one.
    pub(crate) fn socket(&self) -> &str {
        &self.socket
    }

    /// Serves peers until dropped.
    ///
    /// # Errors
    /// The socket cannot be served at all.
    pub(crate) async fn serve(self: Arc<Self>) -> Result<(), TransferError> {
        let broken = |source| TransferError::Io {
            what: "serve the socket of the pool",
            source,
        };
        let listener = self.listener.try_clone().map_err(broken)?;
        let listener = UnixListener::from_std(listener).map_err(broken)?;
        let peers = Tracker::new();
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                // Out of descriptors, say: that passes.
                Err(error) => {
                    tracing::warn!(%error, "a process that asks for the pool is kept waiting");
                    tokio::time::sleep(limits::DOOR_PAUSE).await;
                    continue;
                }
            };
            if peers.len() >= limits::MAX_DOOR_PEERS {
                tracing::warn!("too many processes ask for the pool at once, one is turned away");
                continue;
            }
            let door = Arc::clone(&self);
            peers.spawn(async move {
                let served = tokio::time::timeout(limits::DOOR_PATIENCE, door.admit(stream)).await;
                if !matches!(served, Ok(Ok(()))) {
                    tracing::info!("a process did not get the pool");
                }
            });
        }
    }

    async fn admit(&self, mut stream: UnixStream) -> io::Result<()> {
        let peer = stream.peer_cred()?.uid();
        if peer != rustix::process::geteuid().as_raw() && peer != 0 {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut asks = [0; ASK_BYTES];
        stream.read_exact(&mut asks).await?;
        let access = asked(&asks, &self.pool).ok_or(io::ErrorKind::InvalidData)?;
        let file = self.memory.descriptor(access)?;
        let gives = answer(self.memory.bytes());
        let files = [file.as_fd()];
        let sent = stream
            .async_io(Interest::WRITABLE, || {
                let mut space =
                    [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                control.push(SendAncillaryMessage::ScmRights(&files));
                let parts = [io::IoSlice::new(&gives)];
                Ok(sendmsg(&stream, &parts, &mut control, SendFlags::NOSIGNAL)?)
            })
            .await?;
        let whole = sent == gives.len();
        whole.then_some(()).ok_or(io::ErrorKind::WriteZero.into())
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Removes the socket of a service that was killed; one that answers stays, and so does any other file.
fn remove_stale(path: &Path) -> io::Result<()> {
    let found = match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    if !found.file_type().is_socket() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    match Plain::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
        Err(error) => Err(error),
    }
}
