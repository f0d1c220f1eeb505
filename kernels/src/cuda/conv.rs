//! Convolutions with stride 1 and zero padding, channels-last, as matrix products on the tensor cores.
//!
//! Windows are 3x3, 3x3x3 (padding 1) and 1x1; operands bf16 or f16, sums fp32. An image's result depends on
//! that image alone. Taps in time that fall outside the clip are zero and cost nothing: a clip of one frame
//! pays for 9 taps of 27.

use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

use super::conv_layout::{CHANNEL_STEP, ChannelSums, GpuConvWeight, Pictures, same_gpu};
use super::error::{Result, argument, shape};
use super::launch::int;
use super::map::TensorMap;
use super::tensor::{GpuTensor, GpuType};

const OP: &str = "conv";
const FILE: &str = "conv";
/// Threads of a block: a copying warpgroup and two that multiply.
const THREADS: u32 = 384;
/// Pixels of a tile of a 1x1 window, and side of a tile of the others.
const TILE_PIXELS: usize = 256;
const TILE_SIDE: usize = 16;
/// Warpgroups that multiply; each sums its own part of a tile.
const PARTS: usize = 2;
/// Input channels of a step: 128 bytes.
const STEP_CHANNELS: usize = 64;
/// Output channels of a tile; fewer where a 3x3 window has floats as output, because such outputs are narrow.
const TILE_CHANNELS: usize = 128;
const NARROW_TILE_CHANNELS: usize = 32;
/// Channels of the output summed into one partial of the statistics.
const SUM_CHANNELS: usize = 4;
/// Pixel tiles that share a pass over the weights: with as many as fit the GPU, both stay in the L2 cache.
const GROUP: i32 = 16;

/// Where the channels of the output go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Moves {
    /// They stay: `[images, frames, height, width, c_out]`.
    #[default]
    None,
    /// Channel `sub * c + k` becomes channel `k` of sub-position `sub = (t * 2 + y) * 2 + x`: twice the
    /// height and width, and `frames` (1 or 2) times the frames.
    ToSpace {
        /// Frames of a cell.
        frames: usize,
    },
    /// The inverse: half the height and width, the sub-position is the slow part of the channel.
    ToChannels {
        /// Frames of a cell.
        frames: usize,
    },
}

impl Moves {
    fn cell_frames(self) -> usize {
        match self {
            Self::None => 1,
            Self::ToSpace { frames } | Self::ToChannels { frames } => frames,
        }
    }

    fn code(self) -> i32 {
        match self {
            Self::None => 0,
            Self::ToSpace { .. } => 1,
            Self::ToChannels { .. } => 2,
        }
    }
}

/// What is added to the product.
#[derive(Clone, Copy, Debug)]
pub struct Shortcut<'a> {
    /// Pixels of the input's size and type; may be the output where channels stay.
    pub pictures: &'a Pictures,
    /// How often each of its channels is repeated, consecutively; a power of two.
    pub repeat: usize,
}

/// What happens to the product on its way out.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConvOptions<'a> {
    /// Where channels go.
    pub moves: Moves,
    /// Added after the bias, before channels move.
    pub shortcut: Option<Shortcut<'a>>,
    /// F32 scratch for the sums of the output, [`conv_sum_elements`] of them; outputs of 128 channels or
    /// multiples only.
    pub sums: Option<&'a GpuTensor>,
    /// Only frames from this one on are computed and stored.
    pub first_frame: usize,
}

/// `conv::Launch` of `cuda/conv.cuh`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Launch {
    images: i32,
    frames: i32,
    height: i32,
    width: i32,
    first_frame: i32,
    c_in: i32,
    c_out: i32,
    time_taps: i32,
    tiles_y: i32,
    tiles_x: i32,
    tiles_n: i32,
    group: i32,
    store: i32,
    cell_frames: i32,
    out_channels: i32,
    shortcut_channels: i32,
    shortcut_repeat: i32,
    rgb: i32,
    units: i32,
    padding: i32,
    shortcut_image_stride: i64,
    out_image_stride: i64,
    bias: u64,
    shortcut: u64,
    out: u64,
    partials: u64,
}

// SAFETY: numbers and addresses, laid out as the kernel declares them.
unsafe impl DeviceRepr for Launch {}

/// One convolution.
struct Call<'a> {
    out: &'a Pictures,
    /// As the kernel sees it: all pixels in a row for a 1x1 window.
    x: Pictures,
    w: &'a GpuConvWeight,
    options: ConvOptions<'a>,
}

/// F32 elements of the sums of `conv(_, x, w, _)` for pictures `x` of this size.
#[must_use]
pub fn conv_sum_elements(x: [usize; 5], w: &GpuConvWeight) -> usize {
    let [images, frames, height, width, _] = x;
    let tiles = if w.side == 1 {
        (frames * height * width).div_ceil(TILE_PIXELS)
    } else {
        frames * height.div_ceil(TILE_SIDE) * width.div_ceil(TILE_SIDE)
    };
    images * tiles * PARTS * w.c_out().div_ceil(SUM_CHANNELS) * 2
}

/// `out = moves(conv(x, w) + bias + shortcut)`, rounded once after the product and once after the shortcut.
///
/// `x [images, frames, height, width, c_in]` bf16 or f16; `out` has the same type, or F32 or U8 (no moves, no
/// shortcut; 3x3 windows best with few channels): U8 is a colour, `clamp(v / 2 + 1/2, 0, 1) * 255` rounded half
/// to even. Returns the sums of `out` where scratch for them was given.
///
/// # Errors
/// `Argument` naming the operand that does not fit, or what the driver says.
pub fn conv(
    out: &Pictures,
    x: &Pictures,
    w: &GpuConvWeight,
    options: ConvOptions<'_>,
) -> Result<Option<ChannelSums>> {
    let call = Call {
        out,
        x: seen(x, w),
        w,
        options,
    };
    let suffix = call.check(x)?;
    let sums = call.sums()?;
    if out.tensor().numel() == 0 {
        return Ok(sums);
    }
    let launch = call.launch(sums.as_ref())?;
    call.enqueue(&launch, suffix)?;
    Ok(sums)
}

fn seen(x: &Pictures, w: &GpuConvWeight) -> Pictures {
    if w.side == 1 { x.in_a_row() } else { x.clone() }
}

fn tiles(x: &Pictures, w: &GpuConvWeight) -> (usize, usize) {
    if w.side == 1 {
        (1, x.width.div_ceil(TILE_PIXELS))
    } else {
        (x.height.div_ceil(TILE_SIDE), x.width.div_ceil(TILE_SIDE))
    }
}

impl Call<'_> {
    /// The output is floats or colours rather than 16-bit floats.
    fn wide(&self) -> bool {
        matches!(self.out.dtype(), GpuType::F32 | GpuType::U8)
    }

    fn tile_channels(&self) -> usize {
        if self.wide() && self.w.side == 3 {
            NARROW_TILE_CHANNELS
        } else {
            TILE_CHANNELS
        }
    }

    /// Everything that could be wrong, before anything is launched; the name of the kernels' type.
    fn check(&self, x: &Pictures) -> Result<&'static str> {
        let suffix = x.expect_half(OP, "x")?;
        let (w, options) = (self.w, &self.options);
        if w.packed.dtype() != x.dtype() || x.channels != w.c_in() {
            let expected = format!("{:?} elements, {} channels", w.packed.dtype(), w.c_in());
            return Err(shape(OP, "x", expected, &x.size()));
        }
        if options.first_frame >= x.frames.max(1) || (options.first_frame > 0 && w.side == 1) {
            return Err(argument(
                OP,
                "first_frame",
                "is not a frame of x, or the window is 1x1",
            ));
        }
        let size = self.out_size(x)?;
        let kind = if self.wide() {
            self.out.dtype()
        } else {
            x.dtype()
        };
        self.out.expect_size(OP, "out", size, kind)?;
        if self.wide() {
            let plain = options.moves == Moves::None && options.shortcut.is_none();
            if !plain || options.sums.is_some() || (kind == GpuType::U8 && w.side == 1) {
                return Err(argument(
                    OP,
                    "out",
                    "must be 16-bit floats for these options",
                ));
            }
        } else {
            self.out.expect_half(OP, "out")?;
            if !w
                .c_out()
                .is_multiple_of(if w.side == 1 { CHANNEL_STEP } else { 2 })
            {
                let expected = "output channels in multiples of 8, or 2 for 3x3 windows";
                return Err(shape(OP, "w", expected, w.packed.shape()));
            }
        }
        if let Some(shortcut) = &options.shortcut {
            self.check_shortcut(x, shortcut)?;
        }
        let bias = w.bias.as_ref().unwrap_or(&w.packed);
        same_gpu(OP, &[x.tensor(), self.out.tensor(), &w.packed, bias])?;
        Ok(suffix)
    }

    fn out_size(&self, x: &Pictures) -> Result<[usize; 5]> {
        let (c, moves) = (self.w.c_out(), self.options.moves);
        let [images, frames, height, width, _] = x.size();
        let frames = frames - self.options.first_frame;
        let cell = moves.cell_frames();
        let subs = 4 * cell;
        if moves != Moves::None && (!matches!(cell, 1 | 2) || self.w.side == 1) {
            return Err(argument(
                OP,
                "moves",
                "need a 3x3 window and cells of 1 or 2 frames",
            ));
        }
        match moves {
            Moves::None => Ok([images, frames, height, width, c]),
            Moves::ToSpace { .. } if c.is_multiple_of(subs * 8) => {
                Ok([images, frames * cell, 2 * height, 2 * width, c / subs])
            }
            Moves::ToChannels { .. }
                if [height, width].iter().all(|s| s.is_multiple_of(2))
                    && frames.is_multiple_of(cell)
                    && self.options.first_frame == 0
                    && self.options.sums.is_none() =>
            {
                Ok([images, frames / cell, height / 2, width / 2, c * subs])
            }
            _ => Err(shape(OP, "x", "a size that divides into cells", &x.size())),
        }
    }

    fn check_shortcut(&self, x: &Pictures, shortcut: &Shortcut<'_>) -> Result<()> {
        let from = shortcut.pictures;
        let wanted = [x.images, x.frames, x.height, x.width, from.channels];
        from.expect_size(OP, "shortcut", wanted, x.dtype())?;
        let repeat = shortcut.repeat;
        // A thread reads what eight columns need at once.
        let ragged = !self.w.c_out().is_multiple_of(CHANNEL_STEP);
        let unit = (CHANNEL_STEP / repeat.max(1)).max(1);
        let fits = repeat.is_power_of_two()
            && from.channels * repeat == self.w.c_out()
            && (ragged || from.channels.is_multiple_of(unit))
            && from.tensor().address().is_multiple_of(16);
        if fits && self.options.first_frame == 0 {
            return Ok(());
        }
        Err(shape(
            OP,
            "shortcut",
            "channels that repeat to those of w",
            &from.size(),
        ))
    }

    fn sums(&self) -> Result<Option<ChannelSums>> {
        let Some(scratch) = self.options.sums else {
            return Ok(None);
        };
        if !self.out.channels.is_multiple_of(TILE_CHANNELS) {
            return Err(argument(
                OP,
                "sums",
                "need an output of a multiple of 128 channels",
            ));
        }
        let (tiles_y, tiles_x) = tiles(&self.x, self.w);
        let frames = self.x.frames - self.options.first_frame;
        let subs = self.w.c_out() / self.out.channels;
        let units = frames * tiles_y * tiles_x * PARTS * subs;
        let sizes = [self.out.images, self.out.channels, SUM_CHANNELS, units];
        ChannelSums::within(OP, scratch, sizes).map(Some)
    }

    fn launch(&self, sums: Option<&ChannelSums>) -> Result<Launch> {
        let (x, w) = (&self.x, self.w);
        let number = |value| int(OP, "size", value);
        let (tiles_y, tiles_x) = tiles(x, w);
        let mut launch = Launch {
            images: number(x.images)?,
            frames: number(x.frames)?,
            height: number(x.height)?,
            width: number(x.width)?,
            first_frame: number(self.options.first_frame)?,
            c_in: number(x.channels)?,
            c_out: number(w.c_out())?,
            time_taps: number(w.time_taps)?,
            tiles_y: number(tiles_y)?,
            tiles_x: number(tiles_x)?,
            tiles_n: number(w.c_out().div_ceil(self.tile_channels()))?,
            group: GROUP,
            store: self.options.moves.code(),
            cell_frames: number(self.options.moves.cell_frames())?,
            out_channels: number(self.out.channels)?,
            rgb: i32::from(self.out.dtype() == GpuType::U8),
            out_image_stride: self.out.image_stride as i64,
            bias: w.bias.as_ref().map_or(0, GpuTensor::address),
            out: self.out.tensor().address(),
            ..Launch::default()
        };
        if let Some(shortcut) = &self.options.shortcut {
            let from = shortcut.pictures;
            launch.shortcut = from.tensor().address();
            launch.shortcut_channels = number(from.channels)?;
            launch.shortcut_repeat = shortcut.repeat.trailing_zeros() as i32;
            launch.shortcut_image_stride = from.image_stride as i64;
        }
        if let Some(sums) = sums {
            launch.units = number(sums.units)?;
            launch.partials = sums.partials.address();
        }
        Ok(launch)
    }

    fn enqueue(&self, launch: &Launch, suffix: &str) -> Result<()> {
        let flat = self.w.side == 1;
        let ragged = !self.w.c_out().is_multiple_of(CHANNEL_STEP);
        let name = match (flat, self.wide(), suffix) {
            (false, false, "bf16") if ragged => "conv_ragged_bf16",
            (false, false, _) if ragged => "conv_ragged_f16",
            (false, false, "bf16") => "conv_halo_bf16",
            (false, false, _) => "conv_halo_f16",
            (false, true, "bf16") => "conv_halo_wide_bf16",
            (false, true, _) => "conv_halo_wide_f16",
            (true, false, "bf16") => "conv_flat_bf16",
            (true, false, _) => "conv_flat_f16",
            (true, true, "bf16") => "conv_flat_wide_bf16",
            (true, true, _) => "conv_flat_wide_f16",
        };
        let pixels = self.pixel_map()?;
        let weights = self.weight_map()?;
        let gpu = self.x.tensor().gpu();
        let shared = shared_bytes(flat, self.tile_channels(), self.wide());
        let kernel = gpu.kernel(FILE, name, shared)?;
        let tiles = [
            launch.images,
            launch.tiles_y,
            launch.tiles_x,
            launch.tiles_n,
        ]
        .iter()
        .fold(i64::from(launch.frames - launch.first_frame), |n, t| {
            n * i64::from(*t)
        });
        let tiles = u32::try_from(tiles).ok().filter(|t| *t <= i32::MAX as u32);
        let tiles =
            tiles.ok_or_else(|| argument(OP, "x", "has more tiles than the kernel counts"))?;
        let config = LaunchConfig {
            grid_dim: (tiles.clamp(1, gpu.multiprocessors()), 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: shared,
        };
        let mut builder = gpu.stream().launch_builder(&kernel);
        builder.arg(&pixels).arg(&weights).arg(launch);
        // SAFETY: maps and addresses are those of tensors whose sizes were checked against each other; the
        // kernel masks what lies outside them.
        unsafe { builder.launch(config) }?;
        Ok(())
    }

    /// Pixels in boxes of a tile with its halo, or of 256 pixels of a 1x1 window.
    fn pixel_map(&self) -> Result<TensorMap> {
        let x = &self.x;
        let bytes = x.dtype().bytes();
        let row = x.channels * bytes;
        // Images are the slow part of the last dimension where they have one frame; clips lie adjacent.
        let frame = x.height * x.width * row;
        let plane = if x.frames == 1 {
            x.image_stride * bytes
        } else {
            frame
        };
        if x.frames > 1 && x.images > 1 && x.image_stride * bytes != x.frames * frame {
            return Err(argument(OP, "x", "has clips that are not adjacent"));
        }
        let (boxed_y, boxed_x) = if self.w.side == 1 {
            (1, TILE_PIXELS)
        } else {
            (TILE_SIDE + 2, TILE_SIDE + 2)
        };
        let dims = [x.channels, x.width, x.height, x.images * x.frames];
        let strides = [row, x.width * row, plane];
        let boxed = [STEP_CHANNELS, boxed_x, boxed_y, 1];
        TensorMap::new(x.tensor(), &dims, &strides, &boxed)
    }

    fn weight_map(&self) -> Result<TensorMap> {
        let packed = &self.w.packed;
        let (taps, out, input) = (packed.dim(0), packed.dim(1), packed.dim(2));
        let row = input * packed.dtype().bytes();
        let boxed = [STEP_CHANNELS, self.tile_channels(), 1];
        TensorMap::new(packed, &[input, out, taps], &[row, out * row], &boxed)
    }
}

/// Shared memory of a block, as `conv::Shape` of `cuda/conv.cu` counts it.
fn shared_bytes(flat: bool, channels: usize, wide: bool) -> u32 {
    const ROW: usize = 128;
    const ALIGNMENT: usize = 1024;
    const BLOCK_ROWS: usize = 64;
    let halo = (TILE_SIDE + 2) * (TILE_SIDE + 2);
    let (rows, pixel_stages, weight_stages) = if flat {
        (TILE_PIXELS, 4, 4)
    } else {
        (halo, 2, 6)
    };
    let pixels = pixel_stages * (rows * ROW).next_multiple_of(ALIGNMENT);
    let weights = weight_stages * channels * ROW;
    let staging = if wide {
        0
    } else {
        PARTS * BLOCK_ROWS * channels * 2
    };
    let barriers = 2 * (pixel_stages + weight_stages) * 8;
    (ALIGNMENT + pixels + weights + staging + barriers) as u32
}
