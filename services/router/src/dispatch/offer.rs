//! Prefixes that are offered while they are still computed: denoising is set up, and follows their layers, beside
//! the rest of the prefill.
use std::{
    pin::pin,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use proto::v1::{
    PrefillDone, PrefillResponse, PrefixRow, Timings, get_response::State,
    prefill_response::Event as Prefilled,
};
use registry::Role;
use tonic::Streaming;

use super::{
    Lost, Tries, Walk, lost_here, protocol,
    recovery::{Prefixes, Stage},
    stage_error,
};
use crate::{RouterError, jobs::JobHandle, members::Assignment};

/// A prefill that goes on after it has offered its prefixes.
#[derive(Debug)]
pub(super) struct Rest {
    pub(super) stream: Streaming<PrefillResponse>,
    pub(super) assignment: Assignment,
    pub(super) from: Instant,
    /// The client has seen a text of it.
    pub(super) begun: bool,
    pub(super) offered: Vec<PrefixRow>,
}

impl Walk {
    /// Makes every image while the prefixes may still be computed. When their stage is lost before a worker has
    /// them, another one computes them, as if nothing had been offered.
    pub(super) async fn denoise_beside(
        &self,
        prefixes: &Prefixes,
        (mut rest, tries): (Option<Rest>, &mut Tries),
        (job, timings): (&JobHandle, &mut Timings),
    ) -> Result<(), RouterError> {
        loop {
            let Some(mut going) = rest.take() else {
                prefixes.tell(Stage::Whole);
                job.set_state(State::Denoise);
                return self.denoise(prefixes, job, timings).await;
            };
            prefixes.tell(Stage::Computing);
            let lost = {
                let mut computed = pin!(self.computed(&mut going));
                let mut denoised = pin!(self.denoise(prefixes, job, timings));
                let mut whole = false;
                loop {
                    tokio::select! {
                        biased;
                        ended = &mut computed, if !whole => match ended {
                            Ok(done) => {
                                whole = true;
                                prefixes.whole(done);
                                job.set_state(State::Denoise);
                            }
                            // A worker has all of it: the stage's last word is not needed.
                            Err(_) if prefixes.is_fetched().await => {
                                whole = true;
                                prefixes.tell(Stage::Whole);
                            }
                            Err(lost) => break lost,
                        },
                        ended = &mut denoised => {
                            if ended.is_ok() && !whole && let Ok(done) = computed.await {
                                prefixes.whole(done);
                            }
                            return ended;
                        }
                    }
                }
            };
            self.lost(going.from, tries, (&going.assignment, &lost.error));
            tries.again(lost, &going.assignment)?;
            let (prefix, next) = self.prefill(tries, false).await?;
            prefixes.replace(prefix).await?;
            rest = next;
        }
    }

    /// Follows a prefill to the end of its stream.
    pub(super) async fn computed(&self, rest: &mut Rest) -> Result<PrefillDone, Lost> {
        let (assignment, begun) = (&rest.assignment, rest.begun);
        let mut done = None;
        while let Some(message) = self
            .word(assignment, rest.stream.message())
            .await
            .map_err(|status| lost_here(stage_error(Role::ArStage, assignment, &status), begun))?
        {
            if let Some(Prefilled::Done(told)) = message.event {
                let named = |rows: &[PrefixRow]| -> Vec<_> {
                    let handles = rows.iter().filter_map(|row| row.prefix.as_ref());
                    handles
                        .map(|prefix| (prefix.slot, prefix.generation))
                        .collect()
                };
                if named(&told.rows) != named(&rest.offered) {
                    let error = protocol(Role::ArStage, "published other rows than it offered");
                    return Err(lost_here(error, begun));
                }
                self.notes
                    .prefilled(rest.from, &assignment.member_id, &told);
                done = Some(told);
            }
        }
        done.ok_or_else(|| lost_here(protocol(Role::ArStage, "ended without a result"), begun))
    }
}

impl Prefixes {
    async fn is_fetched(&self) -> bool {
        self.current().await.fetched.load(Ordering::Acquire)
    }

    /// Those of another stage take the place of those that were lost; they must be the very same ones.
    async fn replace(&self, prefix: super::Prefix) -> Result<(), RouterError> {
        let mut current = self.current.lock().await;
        if !prefix.is_like(&current) {
            return Err(RouterError::PrefixChanged);
        }
        *current = Arc::new(prefix);
        Ok(())
    }
}
