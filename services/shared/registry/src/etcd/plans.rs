//! Plans: replaced one generation at a time, by whoever comes first.
use etcd_client::{GetOptions, Txn, TxnOp};
use prost::Message as _;

use crate::{
    Plan, RegistryError,
    etcd::{Etcd, MAX_TRIES, answers, contended, feed::unsigned, revision, same, table},
    state::{MAX_PLANS, check_plan, next_generation},
};

impl Etcd {
    pub(super) async fn replace_plan(&self, plan: Plan) -> Result<u64, RegistryError> {
        check_plan(&plan)?;
        // The key's own revision is the epoch of the publication.
        let plan = Plan { epoch: 0, ..plan };
        let (key, value) = (self.keys.plan(&plan.pool), plan.encode_to_vec());
        let mut sent = false;
        for _ in 0..MAX_TRIES {
            let count = GetOptions::new().with_prefix().with_count_only();
            let reads = [
                TxnOp::get(key.as_str(), None),
                TxnOp::get(self.keys.plans(), Some(count)),
            ];
            let txn = Txn::new().and_then(reads.to_vec());
            let mut read = answers(&self.txn("read a plan", txn).await?);
            let [all, before] = [(); 2].map(|()| read.pop().unwrap_or_default());
            let before = before.kv;
            if let Some(mine) = before.as_ref().filter(|kv| sent && kv.value() == value) {
                // A try before this one has written, only its answer was lost.
                return Ok(unsigned(mine.mod_revision()));
            }
            let current = before
                .as_ref()
                .and_then(|kv| table::plan(&plan.pool, kv.value(), unsigned(kv.mod_revision())));
            next_generation(&plan, current.map_or(0, |plan| plan.generation))?;
            if before.is_none() && all.count >= MAX_PLANS {
                return Err(RegistryError::FullOfPlans(MAX_PLANS));
            }
            let writes = [
                TxnOp::put(key.as_str(), value.clone(), None),
                self.put_epoch(),
            ];
            let txn = Txn::new()
                .when([same(key.clone(), before.as_ref())])
                .and_then(writes.to_vec());
            let written = self.txn("publish a plan", txn).await?;
            if written.succeeded() {
                return Ok(unsigned(revision(&written)));
            }
            sent = true;
        }
        Err(contended("publishing a plan"))
    }
}
