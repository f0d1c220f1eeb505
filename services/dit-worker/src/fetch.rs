//! Brings the prefixes of a request here and checks that they are what they claim to be.
use base::MemberId;
use kv::KvGeometry;
use kv_transfer::{Fetched, KvClient, Lease};
use model::PrefixKv;
use proto::v1::PrefixHandle;
use stage::StageError;

use crate::order::Order;

/// Prefixes that have arrived and verified.
#[derive(Debug)]
pub(crate) struct FetchedRows {
    cond: Fetched,
    uncond: Option<Fetched>,
}

/// Keep the prefixes in the pool while the job runs; dropping them lets go, in the background.
pub(crate) type Leases = Vec<Lease>;

/// Fetches both rows side by side.
pub(crate) async fn both(
    client: &KvClient,
    order: &Order,
    geometry: &KvGeometry,
    receiver: &MemberId,
) -> Result<FetchedRows, StageError> {
    let fetch = async |handle: &PrefixHandle| {
        client
            .fetch(handle, geometry, &order.request_id, receiver.as_str())
            .await
            .map_err(|error| StageError::of(&error))
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

impl FetchedRows {
    fn rows(&self) -> impl Iterator<Item = &Fetched> {
        std::iter::once(&self.cond).chain(&self.uncond)
    }

    /// Payload bytes that travelled.
    pub(crate) fn bytes(&self) -> u64 {
        self.rows().map(|row| row.bytes).sum()
    }

    /// What carried them, as the data plane names it.
    pub(crate) fn transport(&self) -> String {
        let mut names: Vec<&str> = self.rows().map(|row| row.transport.as_str()).collect();
        names.dedup();
        names.join("+")
    }

    /// The prefixes as the model takes them, cond first.
    pub(crate) fn into_prefixes(
        self,
        geometry: KvGeometry,
    ) -> Result<(PrefixKv, Option<PrefixKv>, Leases), StageError> {
        let mut leases = Vec::new();
        let mut prefix = |row: Fetched| {
            leases.push(row.lease);
            PrefixKv::from_bytes(geometry, row.tokens, &row.payload)
        };
        let cond = prefix(self.cond)?;
        let uncond = self.uncond.map(prefix).transpose()?;
        Ok((cond, uncond, leases))
    }
}
