//! Sums over the ranks of a group while text is decoded: every rank has a part of each token's sum, gets those of the
//! others, and adds all of them in the order of ranks, so that every rank has the same bits.
//!
//! Ranks that are threads of one process, on GPUs that reach each other's memory, write their parts there from their
//! kernels, and the kernels that read wait on the device: some microseconds less than a call of a library. Where it
//! is otherwise whoever calls gathers the parts. **Nobody waits for ever**: a kernel that waits in vain gives up
//! after ten seconds and says so in [`DecodeParts::check`].

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use cudarc::driver::{DeviceRepr, sys};

use super::decode_rows::DecodeRouting;
use super::device::Gpu;
use super::early::{Start, launch_at};
use super::error::{CudaError, Result, argument};
use super::launch::{Grid, aligned, int};
use super::memory::DeviceBuffer;
use super::tensor::{GpuTensor, GpuType};

/// Longest wait of a kernel for another rank's.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most ranks (one more than `kMostOthers` of `cuda/decode_rows.cu`).
const MOST_RANKS: usize = 8;
/// Threads of a block of the kernel, and elements of a thread.
const THREADS: usize = 128;
const VECTOR: usize = 8;
/// Parts of two sums lie side by side: while one is read the next is written.
const TURNS: usize = 2;
/// Numbers that a rank tells about itself: its process, its memory, its GPU.
const WORDS: usize = 6;

/// Memory of the ranks of this process that are meeting, by number.
static MEETING: Mutex<Option<HashMap<u64, Arc<DeviceBuffer>>>> = Mutex::new(None);
static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// Makes every rank's entry along dimension 0 of a tensor known to all, where a rank's own is there already.
pub type Gather<'a> = &'a dyn Fn(&GpuTensor) -> Result<()>;

/// Where the parts of all ranks come together on one of them.
#[derive(Debug)]
pub struct DecodeParts {
    memory: Arc<DeviceBuffer>,
    /// I32: blocks of each rank that have come, and whether one did not.
    counts: GpuTensor,
    rank: usize,
    ranks: usize,
    /// Elements of a rank's part of the largest sum.
    most: usize,
    width: usize,
    /// The memory of the other ranks, in order, where kernels write there.
    others: Vec<Arc<DeviceBuffer>>,
    /// Sums so far, and blocks of each rank that they had.
    turn: usize,
    target: u32,
}

/// One sum under way.
#[derive(Debug)]
pub struct PartSum {
    /// F32 `[ranks, tokens, width]`.
    all: GpuTensor,
    arrival: Arrival,
    rank: usize,
    direct: bool,
}

/// `Arrival` of `cuda/decode.cuh`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Arrival {
    count: u64,
    failed: u64,
    target: u32,
    patience: u32,
    ranks: i32,
    me: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for Arrival {}

impl PartSum {
    /// The parts of all ranks, F32 `[ranks, tokens, width]`.
    #[must_use]
    pub fn all(&self) -> &GpuTensor {
        &self.all
    }

    /// Where this rank's part goes, F32 `[tokens, width]`.
    ///
    /// # Errors
    /// None that a sum of [`DecodeParts`] has.
    pub fn own(&self) -> Result<GpuTensor> {
        let dims = &self.all.shape()[1..];
        self.all.narrow0(self.rank, 1)?.reshape(dims)
    }

    /// Whether kernels bring the parts of the others; else they are to be gathered.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    pub(super) fn arrival(&self) -> Arrival {
        self.arrival
    }
}

impl DecodeParts {
    /// For sums of up to `most` tokens of `width` elements over `ranks` ranks, of which this is `rank`. All ranks call
    /// it at the same time; `gather` is how they learn of each other.
    ///
    /// # Errors
    /// `Argument` for more than 8 ranks or another width than a multiple of 8; those of `gather`; what the driver says.
    pub fn meet(
        gpu: &Arc<Gpu>,
        (rank, ranks): (usize, usize),
        (most, width): (usize, usize),
        gather: Gather<'_>,
    ) -> Result<Self> {
        const OP: &str = "DecodeParts::meet";
        if ranks > MOST_RANKS || rank >= ranks || !width.is_multiple_of(VECTOR) {
            let reason = "must be at most 8, with rows of a multiple of 8 elements";
            return Err(argument(OP, "ranks", reason));
        }
        let part = most * width;
        let sums = TURNS * ranks * part * GpuType::F32.bytes();
        let tail = (ranks + 1) * GpuType::I32.bytes();
        let memory = Arc::new(DeviceBuffer::zeroed(gpu, sums + tail, "parts of sums")?);
        // Zeros are there before anybody counts.
        gpu.synchronize()?;
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        meeting(|all| all.insert(number, memory.clone()));
        let others = found(gpu, (rank, ranks), number, gather);
        meeting(|all| all.remove(&number));
        Ok(Self {
            counts: GpuTensor::view(&memory, sums, &[ranks + 1], GpuType::I32)?,
            memory,
            rank,
            ranks,
            most: part,
            width,
            others: others?,
            turn: 0,
            target: 0,
        })
    }

    /// Whether kernels write into the memory of other ranks.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        !self.others.is_empty()
    }

    /// Room for the next sum, of `tokens` tokens; that of the one before the last is used again. All ranks ask for
    /// the same sums in the same order.
    ///
    /// # Errors
    /// `Argument` for more tokens than there is room for.
    pub fn next(&mut self, tokens: usize) -> Result<PartSum> {
        if tokens == 0 || tokens * self.width > self.most {
            let reason = "must be some, and not more than there is room for";
            return Err(argument("DecodeParts::next", "tokens", reason));
        }
        let start = self.place(self.turn, 0, tokens);
        let dims = [self.ranks, tokens, self.width];
        let all = GpuTensor::view(&self.memory, start, &dims, GpuType::F32)?;
        self.turn += 1;
        let blocks = tokens * self.blocks();
        self.target = self.target.wrapping_add(u32::try_from(blocks).unwrap_or(0));
        let direct = self.is_direct();
        let failed = self.counts.address() + (self.ranks * GpuType::I32.bytes()) as u64;
        let arrival = Arrival {
            count: self.counts.address(),
            failed,
            target: self.target,
            patience: u32::try_from(PATIENCE.as_millis()).unwrap_or(u32::MAX),
            ranks: int("DecodeParts::next", "ranks", self.ranks)?,
            me: int("DecodeParts::next", "rank", self.rank)?,
        };
        Ok(PartSum {
            all,
            arrival: if direct { arrival } else { Arrival::default() },
            rank: self.rank,
            direct,
        })
    }

    /// Bytes from the start of a rank's memory to the part of `rank` of sum number `turn`.
    fn place(&self, turn: usize, rank: usize, tokens: usize) -> usize {
        let elements = turn % TURNS * self.ranks * self.most + rank * tokens * self.width;
        elements * GpuType::F32.bytes()
    }

    /// Blocks of a token.
    fn blocks(&self) -> usize {
        self.width.div_ceil(THREADS * VECTOR)
    }

    /// Makes this rank's part of `sum`, the last one, from the rows that [`decode_down`](super::decode_down) left, or
    /// takes it from where it is; then sends it to the other ranks, where kernels do that.
    ///
    /// # Errors
    /// `Argument` naming the operand that does not fit, or what the driver says.
    pub fn spread(
        &self,
        sum: &PartSum,
        outputs: Option<(&GpuTensor, &DecodeRouting)>,
        start: Start,
    ) -> Result<()> {
        const OP: &str = "decode_spread";
        if outputs.is_none() && !sum.direct {
            return Ok(());
        }
        let (tokens, own) = (sum.all.dim(1), sum.own()?);
        let mut arguments = Arguments {
            own: own.address(),
            tokens: int(OP, "sum", tokens)?,
            width: int(OP, "sum", self.width)?,
            ..Arguments::default()
        };
        if let Some((rows, routing)) = outputs {
            let dims = [routing.rows(), self.width];
            rows.expect(OP, "outputs", &dims, GpuType::F32)?;
            aligned(OP, &[("outputs", rows)])?;
            if routing.tokens() != tokens {
                return Err(argument(OP, "outputs", "are of another number of tokens"));
            }
            arguments.y = rows.address();
            arguments.count = int(OP, "routing", routing.top_k())?;
            arguments.by_token = arguments.count;
            arguments.by_choice = 1;
            arguments.shared = i32::from(routing.shared());
        }
        let counts = (TURNS * self.ranks * self.most * GpuType::F32.bytes()
            + self.rank * GpuType::I32.bytes()) as u64;
        let place = self.place(self.turn + 1, self.rank, tokens) as u64;
        for (index, other) in self.others.iter().enumerate() {
            arguments.other[index] = other.address() + place;
            arguments.arrived[index] = other.address() + counts;
        }
        arguments.others = int(OP, "ranks", self.others.len())?;
        let wide = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let grid = Grid {
            blocks: (wide(tokens), wide(self.blocks()), 1),
            threads: wide(THREADS),
            shared: 0,
        };
        let kernel = ("decode_rows", "decode_spread");
        // SAFETY: the own part was checked against the rows; every rank's memory has the same layout, is mapped here,
        // and lives as long as this.
        unsafe { launch_at(self.memory.gpu(), kernel, grid, start, &arguments, None) }
    }

    /// Whether all parts came in time, after everything enqueued has run.
    ///
    /// # Errors
    /// `GroupEnded` when one did not: what was computed since is worthless. What the driver says.
    pub fn check(&self) -> Result<()> {
        if !self.is_direct() {
            return Ok(());
        }
        let failed = self.counts.narrow0(self.ranks, 1)?.to_i32_vec()?;
        if failed == [0] {
            return Ok(());
        }
        let seconds = PATIENCE.as_secs();
        let reason = format!("a rank sent no part of a sum within {seconds} s");
        Err(CudaError::GroupEnded { reason })
    }
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Arguments {
    y: u64,
    own: u64,
    other: [u64; MOST_RANKS - 1],
    arrived: [u64; MOST_RANKS - 1],
    others: i32,
    tokens: i32,
    width: i32,
    count: i32,
    by_token: i32,
    by_choice: i32,
    shared: i32,
}

// SAFETY: addresses and numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for Arguments {}

/// Runs on the memory of the ranks that are meeting.
fn meeting<T>(run: impl FnOnce(&mut HashMap<u64, Arc<DeviceBuffer>>) -> T) -> T {
    let mut all = MEETING.lock().unwrap_or_else(PoisonError::into_inner);
    run(all.get_or_insert_with(HashMap::new))
}

/// A number that other processes have hardly.
fn process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// The memory of the other ranks, in order; none unless every rank can write to every other one.
fn found(
    gpu: &Arc<Gpu>,
    (rank, ranks): (usize, usize),
    number: u64,
    gather: Gather<'_>,
) -> Result<Vec<Arc<DeviceBuffer>>> {
    let words = |value: u64| [value as u32, (value >> 32) as u32].map(u32::cast_signed);
    let (process, ordinal) = (words(process()), words(gpu.ordinal() as u64));
    let mine = [process, words(number), ordinal].concat();
    let told = all_of(gpu, (rank, ranks), &mine, gather)?;
    let wide = |low: i32, high: i32| {
        u64::from(low.cast_unsigned()) | u64::from(high.cast_unsigned()) << 32
    };
    let mut others = Vec::with_capacity(ranks - 1);
    let mut reached = true;
    for (other, of) in told.chunks_exact(WORDS).enumerate() {
        if other == rank {
            continue;
        }
        let there = (of[..2] == process)
            .then(|| meeting(|all| all.get(&wide(of[2], of[3])).cloned()))
            .flatten();
        match there {
            Some(memory) if reaches(gpu, memory.gpu())? => others.push(memory),
            _ => reached = false,
        }
    }
    // What one cannot do nobody does.
    let able = all_of(gpu, (rank, ranks), &[i32::from(reached)], gather)?;
    if able.contains(&0) {
        others.clear();
    }
    Ok(others)
}

/// What every rank tells, in order.
fn all_of(
    gpu: &Arc<Gpu>,
    (rank, ranks): (usize, usize),
    mine: &[i32],
    gather: Gather<'_>,
) -> Result<Vec<i32>> {
    let none = vec![0; ranks * mine.len()];
    let all = GpuTensor::from_i32(gpu, &[ranks, mine.len()], &none, "ranks that meet")?;
    let bytes: Vec<u8> = mine.iter().flat_map(|word| word.to_le_bytes()).collect();
    all.narrow0(rank, 1)?.write_bytes(&bytes)?;
    gather(&all)?;
    all.to_i32_vec()
}

/// Lets kernels of `from` reach the memory of `to`, if the machine can.
fn reaches(from: &Gpu, to: &Gpu) -> Result<bool> {
    if from.ordinal() == to.ordinal() {
        return Ok(false);
    }
    let there = to.context()?.clone();
    let here = from.context()?;
    let mut able = 0;
    // SAFETY: two devices that are open; writes one integer.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut able, here.cu_device(), there.cu_device()) }
        .result()?;
    if able == 0 {
        return Ok(false);
    }
    // SAFETY: the context of `from` is current; that of `to` lives as long as its memory, which is kept with it.
    let enabled = unsafe { sys::cuCtxEnablePeerAccess(there.cu_ctx(), 0) };
    if enabled != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
        enabled.result()?;
    }
    Ok(true)
}
