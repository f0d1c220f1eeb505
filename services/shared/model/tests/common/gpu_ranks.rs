//! Two ranks on two GPUs through NCCL, or on one GPU through copies.
#![allow(dead_code)]

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kernels::cuda::{Comm, CommId, CommOptions, CudaError, Gpu, GpuTensor, Lane, Mark, Transfer};
use model::gpu::GpuGroup;

pub(crate) const RANKS: usize = 2;
/// Longest wait for the other rank.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// What a rank has sent in the current round.
pub(crate) struct Posted {
    sent: Vec<(usize, GpuTensor)>,
    ready: Mark,
}

#[derive(Default)]
pub(crate) struct Rounds {
    posted: Vec<Option<Arc<Posted>>>,
    copied: Vec<Option<Arc<Mark>>>,
    /// Ranks that have come to each phase, ever.
    arrived: [usize; 2],
    ended: Option<String>,
}

/// Ranks that are threads and share one GPU, or two without NCCL.
struct Local {
    rank: usize,
    gpu: Arc<Gpu>,
    rounds: Arc<(Mutex<Rounds>, Condvar)>,
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Local")
    }
}

impl Local {
    /// Puts `give` on the table and waits until all ranks have. Nobody comes back to a phase before all have
    /// passed the other one.
    fn meet<T>(
        &self,
        phase: usize,
        give: impl FnOnce(&mut Rounds),
        take: impl Fn(&Rounds) -> Vec<T>,
    ) -> Result<Vec<T>, CudaError> {
        let (lock, changed) = &*self.rounds;
        let mut rounds = lock.lock().unwrap();
        give(&mut rounds);
        rounds.arrived[phase] += 1;
        let complete = rounds.arrived[phase].next_multiple_of(RANKS);
        changed.notify_all();
        loop {
            if let Some(reason) = &rounds.ended {
                return Err(CudaError::GroupEnded {
                    reason: reason.clone(),
                });
            }
            if rounds.arrived[phase] >= complete {
                break;
            }
            let (next, timeout) = changed.wait_timeout(rounds, PATIENCE).unwrap();
            rounds = next;
            if timeout.timed_out() {
                rounds.ended = Some("the other rank did not come".into());
            }
        }
        Ok(take(&rounds))
    }
}

impl GpuGroup for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        RANKS
    }

    fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn exchange(&self, transfers: &[Transfer<'_>], _: Lane) -> Result<(), CudaError> {
        let sent = transfers.iter().filter_map(|t| match t {
            Transfer::Send { to, tensor } => Some((*to, (*tensor).clone())),
            Transfer::Receive { .. } => None,
        });
        let posted = Arc::new(Posted {
            sent: sent.collect(),
            ready: self.gpu.mark()?,
        });
        let me = self.rank;
        let all = self.meet(
            0,
            |r| r.posted[me] = Some(posted),
            |r| r.posted.iter().map(|p| p.clone().unwrap()).collect(),
        )?;
        let mut taken = [0; RANKS];
        for rank in &all {
            self.gpu.wait_for(&rank.ready)?;
        }
        for transfer in transfers {
            let Transfer::Receive { from, tensor } = transfer else {
                continue;
            };
            let mut mine = all[*from].sent.iter().filter(|(to, _)| *to == me);
            let (_, source) = mine.nth(taken[*from]).expect("something was sent");
            taken[*from] += 1;
            assert_eq!(source.shape(), tensor.shape());
            tensor.copy_from(source)?;
        }
        let done = Arc::new(self.gpu.mark()?);
        let all = self.meet(
            1,
            |r| r.copied[me] = Some(done),
            |r| r.copied.iter().map(|p| p.clone().unwrap()).collect(),
        )?;
        for mark in &all {
            self.gpu.wait_for(mark)?;
        }
        Ok(())
    }

    fn mark(&self) -> Result<Mark, CudaError> {
        self.gpu.mark()
    }

    fn wait_for(&self, mark: &Mark) -> Result<(), CudaError> {
        self.gpu.wait_for(mark)
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.gpu.synchronize()
    }

    fn abort(&self, reason: &str) {
        let (lock, changed) = &*self.rounds;
        lock.lock().unwrap().ended = Some(reason.to_owned());
        changed.notify_all();
    }
}

/// Both ends of a new group, made by their own threads.
pub(crate) enum Meeting {
    Nccl(CommId),
    Local(Arc<(Mutex<Rounds>, Condvar)>),
}

impl Meeting {
    pub(crate) fn new() -> Self {
        if Gpu::count().unwrap() >= RANKS {
            return Self::Nccl(CommId::new().unwrap());
        }
        let rounds = Rounds {
            posted: vec![None; RANKS],
            copied: vec![None; RANKS],
            ..Rounds::default()
        };
        Self::Local(Arc::new((Mutex::new(rounds), Condvar::new())))
    }

    pub(crate) fn join(&self, rank: usize, patience: Duration) -> Arc<dyn GpuGroup> {
        let ordinal = match self {
            Self::Nccl(_) => rank,
            Self::Local(_) => 0,
        };
        self.join_on(Gpu::open(ordinal).unwrap(), rank, patience)
    }

    /// On a GPU that is open: a group that follows another one has the same.
    pub(crate) fn join_on(
        &self,
        gpu: Arc<Gpu>,
        rank: usize,
        patience: Duration,
    ) -> Arc<dyn GpuGroup> {
        match self {
            Self::Nccl(id) => {
                let options = CommOptions {
                    deadline: patience,
                    blocks: None,
                };
                Arc::new(Comm::join(&gpu, id, rank, RANKS, &options).unwrap())
            }
            Self::Local(rounds) => Arc::new(Local {
                rank,
                gpu,
                rounds: rounds.clone(),
            }),
        }
    }
}
