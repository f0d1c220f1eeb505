//! Brings the prefixes of a request here and checks that they are what they claim to be.
use std::sync::Arc;

use base::{Code, Fault as _, MemberId};
use kv::KvGeometry;
use kv_transfer::{FetchRequest, Fetched, KvClient, Lease};
use model::PrefixKv;
use proto::v1::PrefixHandle;
use stage::StageError;

use crate::order::Order;

/// Rows in memory of this process, found right; [`FetchedRows::into_prefixes`] makes prefixes of them.
#[derive(Debug)]
pub(crate) struct FetchedRows {
    cond: (Fetched, Values),
    uncond: Option<(Fetched, Values)>,
}

/// Memory of the model.
#[derive(Debug)]
struct Values(Vec<f32>);

impl Values {
    fn for_bytes(bytes: usize) -> Self {
        Self(vec![0.0; bytes / size_of::<f32>()])
    }
}

impl AsMut<[u8]> for Values {
    fn as_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// Keep the prefixes in the pool while the job runs; dropping them lets go, in the background.
pub(crate) type Leases = Vec<Lease>;

/// Fetches both rows side by side, and copies them once, to where the model reads them. Rows that are still
/// computed are followed layer by layer.
pub(crate) async fn both(
    client: &KvClient,
    order: &Order,
    geometry: &KvGeometry,
    receiver: &MemberId,
) -> Result<FetchedRows, StageError> {
    let fetch = async |handle: &PrefixHandle| {
        let request = FetchRequest {
            expected: Some(geometry),
            epoch: order.epoch,
            timeout: order.transfer_timeout,
            ..FetchRequest::new(handle, &order.request_id, receiver.as_str())
        };
        let fetched = client.fetch_to(request, Values::for_bytes).await;
        fetched.map_err(|error| StageError::of(&error))
    };
    let uncond = async {
        match &order.uncond {
            Some(handle) => fetch(handle).await.map(Some),
            None => Ok(None),
        }
    };
    let (cond, uncond) = tokio::try_join!(fetch(&order.cond), uncond)?;
    Ok(FetchedRows { cond, uncond })
}

/// Whether an error says that a prefix will not come, however often it is tried.
pub(crate) fn is_gone(error: &StageError) -> bool {
    matches!(
        error.code(),
        Code::NotFound | Code::Aborted | Code::DataLoss
    )
}

impl FetchedRows {
    fn rows(&self) -> impl Iterator<Item = &Fetched> {
        let rows = std::iter::once(&self.cond).chain(&self.uncond);
        rows.map(|(fetched, _)| fetched)
    }

    /// Payload bytes that travelled.
    pub(crate) fn bytes(&self) -> u64 {
        self.rows().map(|row| row.bytes).sum()
    }

    /// Chunks that had to be read again.
    pub(crate) fn repaired(&self) -> u64 {
        self.rows().map(|row| row.repaired_chunks as u64).sum()
    }

    /// Milliseconds in which nothing travelled because the prefixes were still computed.
    pub(crate) fn waited_ms(&self) -> f64 {
        let longest = self.rows().map(|row| row.waited).max();
        longest.unwrap_or_default().as_secs_f64() * 1e3
    }

    /// What carried them, as the data plane names it.
    pub(crate) fn transport(&self) -> String {
        let mut names: Vec<&str> = self.rows().map(|row| row.transport.as_str()).collect();
        names.dedup();
        names.join("+")
    }

    /// The prefixes as the model takes them, cond first.
    pub(crate) fn into_prefixes(self, geometry: KvGeometry) -> Result<Prefixes, StageError> {
        let mut leases = Vec::new();
        let mut prefix = |(row, values): (Fetched, Values)| {
            leases.push(row.lease);
            let prefix = PrefixKv::new(geometry, row.tokens, values.0)?;
            Ok::<_, StageError>(Arc::new(prefix))
        };
        let cond = prefix(self.cond)?;
        let uncond = self.uncond.map(prefix).transpose()?;
        Ok(Prefixes {
            cond,
            uncond,
            leases,
        })
    }
}

/// Prefixes that are here and were found right.
#[derive(Debug)]
pub(crate) struct Prefixes {
    pub(crate) cond: Arc<PrefixKv>,
    pub(crate) uncond: Option<Arc<PrefixKv>>,
    pub(crate) leases: Leases,
}
