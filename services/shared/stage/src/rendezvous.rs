//! Ranks of several hosts find each other through the registry that they join anyway.
use std::{sync::Arc, time::Duration};

use ::ranks::Rendezvous;
use parallel::ParallelError;
use registry::{Contact, Plan, Registry, RegistryError, Snapshot, Snapshots};
use tokio::runtime::Handle;

/// Each rank keeps its address in the registry's plan of a pool of its own, `<pool>/rank-<n>`, whose
/// generation grows with every start, so that nothing is left over from an earlier one. `world` names the
/// start that all ranks agree on: an address of another one is not taken.
///
/// Its calls block and are made outside of the runtime that the registry's tasks run on.
#[derive(Debug)]
pub struct RegistryRendezvous {
    registry: Arc<dyn Registry>,
    runtime: Handle,
    pool: String,
    world: String,
}

impl RegistryRendezvous {
    /// A rendezvous of the ranks of `pool` that were told the same `world`.
    pub fn new(
        registry: Arc<dyn Registry>,
        runtime: Handle,
        pool: impl Into<String>,
        world: impl Into<String>,
    ) -> Self {
        Self {
            registry,
            runtime,
            pool: pool.into(),
            world: world.into(),
        }
    }

    fn key(&self, rank: usize) -> String {
        format!("{}/rank-{rank}", self.pool)
    }

    /// The world's name, a line feed, the address.
    fn body(&self, blob: &[u8]) -> Vec<u8> {
        [self.world.as_bytes(), b"\n", blob].concat()
    }

    fn blob(&self, picture: &Snapshot, rank: usize) -> Option<Vec<u8>> {
        let body = &picture.plans.get(&self.key(rank))?.body;
        let blob = body.strip_prefix(self.world.as_bytes())?;
        blob.strip_prefix(b"\n").map(<[u8]>::to_vec)
    }

    /// Puts the address in place of what an earlier start left there.
    async fn replace(&self, rank: usize, blob: &[u8]) -> Result<(), RegistryError> {
        let pictures = Snapshots::follow(Arc::clone(&self.registry));
        let mut contacts = pictures.contacts();
        loop {
            // The first picture tells the generation in force.
            let followed = contacts.wait_for(|contact: &Contact| contact.following);
            if followed.await.is_err() {
                tokio::time::sleep(RETRY).await;
                continue;
            }
            let current = pictures.current();
            let generation = current
                .plans
                .get(&self.key(rank))
                .map_or(0, |p| p.generation);
            let plan = Plan {
                pool: self.key(rank),
                generation: generation + 1,
                body: self.body(blob),
                epoch: 0,
            };
            match self.registry.publish_plan(plan).await {
                Ok(_) => return Ok(()),
                // The picture was older than the last start of this rank.
                Err(RegistryError::StalePlan { .. }) => tokio::time::sleep(RETRY).await,
                Err(error) => return Err(error),
            }
        }
    }
}

/// Wait before a picture that was too old, or not there, is looked at again.
const RETRY: Duration = Duration::from_millis(20);

fn failed(what: &'static str, message: String) -> ParallelError {
    ParallelError::Transport {
        what,
        message: message.into(),
    }
}

impl Rendezvous for RegistryRendezvous {
    fn publish(&self, rank: usize, blob: &[u8], timeout: Duration) -> Result<(), ParallelError> {
        const WHAT: &str = "publish an address in the registry";
        let publish = async { tokio::time::timeout(timeout, self.replace(rank, blob)).await };
        match self.runtime.block_on(publish) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(failed(WHAT, error.to_string())),
            Err(_) => Err(failed(WHAT, format!("no answer within {timeout:?}"))),
        }
    }

    fn collect(&self, ranks: usize, timeout: Duration) -> Result<Vec<Vec<u8>>, ParallelError> {
        let all = |picture: &Snapshot| (0..ranks).all(|rank| self.blob(picture, rank).is_some());
        let pictures = async {
            let pictures = Snapshots::follow(Arc::clone(&self.registry));
            pictures.wait(timeout, all).await;
            pictures.current()
        };
        let picture = self.runtime.block_on(pictures);
        let blob = |rank| {
            self.blob(&picture, rank).ok_or(ParallelError::NotJoined {
                rank,
                after: timeout,
            })
        };
        (0..ranks).map(blob).collect()
    }
}

#[cfg(test)]
mod tests {
    use registry::Embedded;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn meet(of: &RegistryRendezvous, ranks: usize, tag: u8) -> Vec<Vec<u8>> {
        let one = |rank: usize| {
            let blob = [tag, rank as u8, b'\n', 0];
            of.publish(rank, &blob, SOON).unwrap();
            of.collect(ranks, SOON).unwrap()
        };
        std::thread::scope(|scope| {
            let one = &one;
            let threads: Vec<_> = (0..ranks).map(|r| scope.spawn(move || one(r))).collect();
            let mut seen = threads.into_iter().map(|t| t.join().unwrap());
            let first = seen.next().unwrap();
            assert!(seen.all(|other| other == first));
            first
        })
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn ranks_find_each_other_and_never_those_of_an_earlier_start() {
        let registry: Arc<dyn Registry> = Arc::new(Embedded::start(base::clock::system()));
        let handle = Handle::current();
        let blocking = move || {
            for start in 0..3_u8 {
                let world = format!("start-{start}");
                let of =
                    RegistryRendezvous::new(Arc::clone(&registry), handle.clone(), "pool", world);
                let want: Vec<Vec<u8>> = (0..3).map(|r| vec![start, r, b'\n', 0]).collect();
                assert_eq!(meet(&of, 3, start), want);
            }
            // Nobody of this start is there, although the addresses of others are.
            let late = RegistryRendezvous::new(registry, handle, "pool", "start-9");
            let error = late.collect(3, Duration::from_millis(200)).unwrap_err();
            assert!(
                matches!(error, ParallelError::NotJoined { rank: 0, .. }),
                "{error}"
            );
        };
        tokio::task::spawn_blocking(blocking).await.unwrap();
    }
}
