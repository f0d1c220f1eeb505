//! A fetch under way: what is sealed is read, checked and handed on while the rest is still being written.
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use base::{Deadline, clock};
use futures_util::StreamExt as _;
use futures_util::stream::{FuturesOrdered, FuturesUnordered};
use kv::{Manifest, ReadPlan};
use proto::v1;
use tonic::Streaming;

use super::channels::call_until;
use super::fetch::{Fetched, Source};
use super::lease::{self, Lease, Terms};
use super::reach::{Place, blocking};
use super::read::{Reader, Store};
use super::spare::Stores;
use super::{Inner, copy};
use crate::local::Mapped;
use crate::{TransferError, limits};

/// A fetch under way.
pub(super) struct Fetch<'a> {
    pub(super) inner: &'a Inner,
    pub(super) terms: &'a Terms,
    pub(super) plan: &'a ReadPlan,
    /// With the checksums known so far.
    pub(super) manifest: Manifest,
    pub(super) deadline: Deadline,
    pub(super) timeout: Option<Duration>,
    /// Of following.
    pub(super) longest: Deadline,
    pub(super) repaired_chunks: usize,
    pub(super) early_bytes: u64,
    pub(super) waited: Duration,
    pub(super) checked: Duration,
    pub(super) transport: String,
}

/// A fetch that has come to its end.
pub(super) struct Done {
    manifest: Manifest,
    source: Source,
    repaired_chunks: usize,
    early_bytes: u64,
    waited: Duration,
    checked: Duration,
    transport: String,
}

impl Done {
    pub(super) fn fetched(self, plan: ReadPlan, lease: Lease) -> Fetched {
        Fetched {
            tokens: self.manifest.tokens,
            bytes: plan.part_bytes() as u64,
            read_bytes: plan.read_bytes(),
            transport: self.transport,
            repaired_chunks: self.repaired_chunks,
            early_bytes: self.early_bytes,
            waited: self.waited,
            checked: self.checked,
            lease,
            manifest: Arc::new(self.manifest),
            source: self.source,
            plan,
        }
    }
}

impl Fetch<'_> {
    /// Fills `out` where that can be done on the way; says whether it is full.
    pub(super) async fn run<B: AsMut<[u8]> + Send + 'static>(
        mut self,
        place: Place,
        out: Option<B>,
    ) -> Result<(Done, Option<(B, bool)>), TransferError> {
        let (source, out) = match place {
            Place::Mapped(slot) => {
                let out = self.follow_mapped(&slot, out).await?;
                (Source::Pool(slot), out)
            }
            Place::Remote(_) => {
                let (source, out) = self.read(place, out).await?;
                (source, out.map(|out| (out, true)))
            }
        };
        let done = Done {
            manifest: self.manifest,
            source,
            repaired_chunks: self.repaired_chunks,
            early_bytes: self.early_bytes,
            waited: self.waited,
            checked: self.checked,
            transport: self.transport,
        };
        Ok((done, out))
    }

    /// Waits until every chunk is sealed; meanwhile those that are go to `out`.
    async fn follow_mapped<B: AsMut<[u8]> + Send + 'static>(
        &mut self,
        slot: &Mapped,
        mut out: Option<B>,
    ) -> Result<Option<(B, bool)>, TransferError> {
        let all = self.plan.chunks().len();
        let streams = copy::is_streamable(self.plan);
        let (mut news, mut taken) = (None, 0);
        loop {
            let ready = self.ready();
            if streams
                && ready > taken
                && let Some(mut buffer) = out.take()
            {
                let (manifest, plan) = (self.manifest.clone(), self.plan.clone());
                let (slot, entries) = (slot.clone(), taken..ready);
                let copy = move || {
                    copy::entries(&manifest, &plan, &slot, (buffer.as_mut(), entries))?;
                    Ok::<_, TransferError>(buffer)
                };
                out = Some(blocking(copy).await??);
                taken = ready;
            }
            if ready == all {
                return Ok(out.map(|out| (out, streams)));
            }
            self.early_bytes = self.plan.store_bytes(0..taken) as u64;
            self.learn(&mut news).await?;
        }
    }

    /// Entries of the plan whose checksums are known: these chunks are sealed.
    fn ready(&self) -> usize {
        let known = self.manifest.crcs.len();
        self.plan.chunks().partition_point(|&chunk| chunk < known)
    }

    /// Reads every entry as soon as it is sealed; while one store travels, the one before it is checked. With a
    /// place for the part, each store goes there and its memory is used again.
    async fn read<B: AsMut<[u8]> + Send + 'static>(
        &mut self,
        place: Place,
        mut out: Option<B>,
    ) -> Result<(Source, Option<B>), TransferError> {
        let all = self.plan.chunks().len();
        let per_store = (limits::STORE_BYTES / self.manifest.chunk_bytes).max(1);
        let (fills, plan) = (out.is_some(), Arc::new(self.plan.clone()));
        let mut done = Stores {
            stores: vec![],
            spares: self.inner.spares.clone(),
        };
        let mut running = FuturesOrdered::new();
        let (mut landed, mut filling) = (VecDeque::new(), FuturesUnordered::new());
        let (mut begun, mut filled, mut news) = (0, 0, None);
        loop {
            let ready = self.ready();
            let reader = Reader {
                reach: &self.inner.reach,
                spares: &self.inner.spares,
                place: &place,
                plan: self.plan,
                deadline: self.deadline,
            };
            while begun < ready && running.len() + landed.len() < limits::STORES_IN_FLIGHT {
                let entries = begun..ready.min(begun + per_store);
                begun = entries.end;
                let crc = |&chunk: &usize| (chunk, self.manifest.crcs[chunk]);
                let chunks = self.plan.chunks()[entries.clone()]
                    .iter()
                    .map(crc)
                    .collect();
                running.push_back(reader.read(entries, chunks));
            }
            if let Some(mut buffer) = out.take_if(|_| !landed.is_empty())
                && let Some(store) = landed.pop_front()
            {
                let plan = Arc::clone(&plan);
                filling.push(blocking(move || {
                    copy::store(&plan, &store, buffer.as_mut());
                    (store, buffer)
                }));
            }
            if begun == all && running.is_empty() && filling.is_empty() {
                return Ok(if fills {
                    (Source::Given, out)
                } else {
                    (Source::Here(done), None)
                });
            }
            tokio::select! {
                Some(store) = running.next() => {
                    let store: Store = store?;
                    self.repaired_chunks += store.repaired;
                    self.checked += store.checked;
                    self.transport.clone_from(&store.transport);
                    if fills { landed.push_back(store) } else { done.stores.push(store) }
                }
                Some(ended) = filling.next() => {
                    let (store, buffer): (Store, B) = ended?;
                    filled = store.entries.end;
                    self.inner.spares.give(store.bytes);
                    out = Some(buffer);
                }
                learnt = self.learn(&mut news), if ready < all => {
                    self.early_bytes = self.plan.store_bytes(0..filled) as u64;
                    learnt?;
                }
            }
        }
    }

    /// Waits until the service tells more checksums: as long as the producer lives, whose lease ends the wait, and
    /// no longer than [`limits::MAX_FOLLOW`]. Meanwhile the own lease is prolonged; what is told has the whole time
    /// of a transfer to come here.
    async fn learn(
        &mut self,
        news: &mut Option<Streaming<v1::FollowResponse>>,
    ) -> Result<(), TransferError> {
        let stream = match news {
            Some(stream) => stream,
            None => news.insert(self.follow().await?),
        };
        let what = "following a prefix that is being written";
        let (inner, terms) = (self.inner, self.terms);
        let ttl = inner.config.ttl;
        let waits = async {
            loop {
                tokio::select! {
                    told = stream.message() => return Ok::<_, TransferError>(told?),
                    () = tokio::time::sleep(ttl / 3) => {
                        let bound = inner.deadline(self.timeout);
                        lease::renew(&inner.channels, terms, ttl, bound).await?;
                    }
                }
            }
        };
        let start = clock::now();
        let told = self.longest.bound(what, waits).await;
        self.waited += clock::now().saturating_duration_since(start);
        let told = told.map_err(|_| TransferError::Deadline { what })??;
        let Some(told) = told else {
            return Err(TransferError::invalid(
                "chunk_crc32c",
                "ended before the last chunk",
            ));
        };
        self.deadline = inner.deadline(self.timeout);
        self.manifest.crcs.extend(told.chunk_crc32c);
        self.manifest
            .validate_announced()
            .map_err(TransferError::Manifest)
    }

    async fn follow(&self) -> Result<Streaming<v1::FollowResponse>, TransferError> {
        let terms = self.terms;
        let mut stub = self.inner.channels.stub(&terms.endpoint)?;
        let message = v1::FollowRequest {
            slot: terms.slot,
            generation: terms.generation,
            lease: terms.lease,
            known_chunks: u32::try_from(self.manifest.crcs.len()).unwrap_or(u32::MAX),
        };
        call_until("following a slot", self.deadline, message, |request| {
            stub.follow(request)
        })
        .await
    }
}
