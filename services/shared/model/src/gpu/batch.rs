//! What stays the same while the same jobs step together.

use kernels::cuda::{GpuTensor, GpuType};

use super::GpuModel;
use super::arena::KvLease;
use super::deal::{BatchRow, Deal, Piece};
use super::group::{Ranks, Travel};
use super::job::GpuJob;
use super::layer::Pass;
use super::rows::{GpuRow, PassTokens, RingKeys, pass};
use super::share::{Attention, Flow, GpuShare};
use super::workspace::{Extent, Workspace};
use crate::error::ModelError;

/// Tables and memory of a pass.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) pass: Pass,
    pub(crate) work: Workspace,
    /// Own pieces, in the order of the residual stream; rows are those of the batch.
    pub(crate) own: Vec<Piece>,
}

/// The same jobs, step after step.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Of the jobs, in order.
    ids: Vec<u64>,
    pub(crate) rows: Vec<BatchRow>,
    pub(crate) deal: Deal,
    /// One for all rows, or one a row where stages work one behind the other.
    pub(crate) parts: Vec<Part>,
    /// F32, of all rows in order, where ranks compute some each.
    pub(crate) velocities: Option<GpuTensor>,
    /// Fresh keys and values; every layer uses the same.
    _leases: Vec<KvLease>,
}

/// What is being put together.
struct Builder<'a, 'b> {
    model: &'a GpuModel,
    jobs: &'a [&'b mut GpuJob],
    rows: &'a [BatchRow],
    leases: Vec<KvLease>,
}

impl GpuModel {
    /// The batch of these jobs: the last one where they are the same.
    pub(super) fn take_batch(&mut self, jobs: &[&mut GpuJob]) -> Result<Batch, ModelError> {
        let ids: Vec<u64> = jobs.iter().map(|job| job.id).collect();
        if let Some(batch) = self.batch.take().filter(|batch| batch.ids == ids) {
            return Ok(batch);
        }
        let mut rows = Vec::new();
        let mut start = 0;
        for (index, job) in jobs.iter().enumerate() {
            for side in 0..job.rows() {
                rows.push(BatchRow {
                    job: index,
                    side,
                    tokens: job.row_tokens(),
                    start,
                });
                start += job.row_tokens();
            }
        }
        let deal = Deal::new(&self.share, &rows)?;
        let mut builder = Builder {
            model: self,
            jobs,
            rows: &rows,
            leases: Vec::new(),
        };
        let parts = if self.share.is_staged() {
            let each = |row: usize| {
                let piece = Piece {
                    row,
                    tokens: 0..rows[row].tokens,
                };
                builder.part(&deal, vec![piece])
            };
            (0..rows.len()).map(each).collect::<Result<_, _>>()?
        } else {
            vec![builder.part(&deal, deal.own().to_vec())?]
        };
        let leases = builder.leases;
        let velocities = (self.share.ranks() > 1).then(|| {
            let each = |row: &BatchRow| jobs[row.job].latents.numel();
            let dims = [rows.iter().map(each).sum()];
            GpuTensor::new(&self.gpu, &dims, GpuType::F32, "velocities")
        });
        Ok(Batch {
            ids,
            velocities: velocities.transpose()?,
            parts,
            deal,
            rows,
            _leases: leases,
        })
    }
}

impl<'a> Builder<'a, '_> {
    /// A pass whose residual stream here is that of `own`.
    fn part(&mut self, deal: &Deal, own: Vec<Piece>) -> Result<Part, ModelError> {
        let (model, share) = (self.model, &self.model.share);
        let (flow, staged) = (share.flow(), share.is_staged());
        let shared = share.ranks() > 1 && !staged;
        let alone = flow == Flow::ALONE;
        let everyone: Vec<Piece> = match flow.attention {
            Attention::Own | Attention::Ring => own.clone(),
            Attention::Heads | Attention::Turned => deal.pieces.concat(),
        };
        let (rows, travel) = self.attended(&everyone, deal)?;
        let group = model.group.as_ref().filter(|_| shared && !alone);
        let ranks = group.map(|group| Ranks::new(group, deal));
        // Rows of the pass are those that attend here.
        let mut pieces = everyone.clone();
        let mut seen: Vec<usize> = Vec::new();
        for piece in &mut pieces {
            let place = seen.iter().position(|row| *row == piece.row);
            piece.row = place.unwrap_or_else(|| {
                seen.push(piece.row);
                seen.len() - 1
            });
        }
        let given = PassTokens {
            pieces: &pieces,
            cos: self.table(&everyone, |job| &job.cos)?,
            sin: self.table(&everyone, |job| &job.sin)?,
            flow,
            ranks,
            travel,
        };
        let pass = pass(model.shape, model.arena.tensor()?, &rows, given)?;
        let extent = extent(share, deal, &own);
        let work = model.workspace_of(&extent, pass.ranks.as_ref())?;
        Ok(Part { pass, work, own })
    }

    /// The rows that have pieces here, each once and in order, with room for their fresh keys.
    fn attended(
        &mut self,
        pieces: &[Piece],
        deal: &Deal,
    ) -> Result<(Vec<GpuRow<'a>>, Travel), ModelError> {
        let (mut rows, mut travel) = (Vec::new(), Travel::default());
        let mut seen: Vec<usize> = Vec::new();
        for piece in pieces {
            if seen.contains(&piece.row) {
                continue;
            }
            seen.push(piece.row);
            let row = &self.rows[piece.row];
            let job: &'a GpuJob = self.jobs[row.job];
            let ring = self.ring(piece, deal, &mut travel)?;
            let at = match ring.first() {
                Some(own) => own.at,
                None => {
                    let lease = self.model.arena.lease(row.tokens, true)?;
                    let at = lease.place();
                    self.leases.push(lease);
                    at
                }
            };
            let prefix = job.prefixes[row.side].run();
            rows.push(GpuRow {
                tokens: row.tokens,
                segments: &job.segments,
                prefix: Some(prefix).filter(|run| run.tokens > 0),
                at,
                appended: 0,
                ring,
            });
        }
        Ok((rows, travel))
    }

    /// Room for the keys of each rank's piece of a row: the same on every rank, so that one copy moves them.
    fn ring(
        &mut self,
        own: &Piece,
        deal: &Deal,
        travel: &mut Travel,
    ) -> Result<Vec<RingKeys>, ModelError> {
        if self.model.share.flow().attention != Attention::Ring {
            return Ok(Vec::new());
        }
        let of = |rank: usize| deal.pieces[rank].iter().find(|p| p.row == own.row);
        let ranks = deal.pieces.len();
        let each = (0..ranks).filter_map(|r| of(r).map(|p| p.tokens.len()));
        let most = each.max().unwrap_or(0);
        let others = (0..ranks).filter(|rank| *rank != deal.me);
        let (mut keys, mut mine) = (Vec::with_capacity(ranks), None);
        for rank in std::iter::once(deal.me).chain(others) {
            let lease = self.model.arena.lease(most, true)?;
            let tensor = lease.tensor()?;
            if rank == deal.me {
                mine = Some(tensor);
            } else {
                travel.receive(rank, tensor);
                travel.send(rank, mine.clone().ok_or_else(no_keys)?);
            }
            keys.push(RingKeys {
                tokens: of(rank).map_or(0..0, |p| p.tokens.clone()),
                at: lease.place(),
            });
            self.leases.push(lease);
        }
        Ok(keys)
    }

    /// Rows of the jobs' rotary tables, those of `pieces`.
    fn table(
        &self,
        pieces: &[Piece],
        of: fn(&GpuJob) -> &GpuTensor,
    ) -> Result<GpuTensor, ModelError> {
        if let [job] = self.jobs {
            let all = of(job);
            let covered: usize = pieces.iter().map(|p| p.tokens.len()).sum();
            let whole = |p: &Piece| p.tokens.len() == self.rows[p.row].tokens;
            if covered == all.dim(0) && pieces.iter().all(whole) {
                return Ok(all.clone());
            }
        }
        let model = self.model;
        let tokens = pieces.iter().map(|p| p.tokens.len()).sum();
        let dims = [tokens, model.config.head_dim];
        let table = GpuTensor::new(&model.gpu, &dims, GpuType::F32, "rotary table")?;
        let mut at = 0;
        for piece in pieces {
            let row = &self.rows[piece.row];
            let first = row.side * row.tokens + piece.tokens.start;
            let part = of(self.jobs[row.job]).narrow0(first, piece.tokens.len())?;
            table.narrow0(at, part.dim(0))?.copy_from(&part)?;
            at += part.dim(0);
        }
        Ok(table)
    }
}

/// The tokens of a pass whose residual stream here is that of `own`.
pub(super) fn extent(share: &GpuShare, deal: &Deal, own: &[Piece]) -> Extent {
    let (flow, tokens) = (share.flow(), own.iter().map(|p| p.tokens.len()).sum());
    if flow == Flow::ALONE {
        return Extent::alone(tokens);
    }
    let cuts = flow.attention != Attention::Own;
    Extent {
        first: deal.starts[deal.me],
        own: tokens,
        all: deal.all_tokens(),
        ranks: share.ranks(),
        whole: if cuts { deal.all_tokens() } else { 0 },
        flow,
    }
}

fn no_keys() -> ModelError {
    ModelError::Internal("a rank of a ring without keys of its own".into())
}
