//! How pictures, weights and sums of the convolutions lie in device memory.

use super::error::{CudaError, Result, argument, shape};
use super::launch::int;
use super::tensor::{GpuTensor, GpuType};
use cudarc::driver::{LaunchConfig, PushKernelArg};

/// Channels that one 16-byte access covers; channel counts are multiples of it.
pub(crate) const CHANNEL_STEP: usize = 8;
/// Any size of a dimension.
pub(crate) const ANY: usize = usize::MAX;

/// Channels-last pictures or clips: pixel `(image, frame, y, x)` is a row of `channels` elements.
///
/// Images are equally far apart, not necessarily adjacent, so that pictures can lie among the other rows of a
/// packed batch.
#[derive(Clone, Debug)]
pub struct Pictures {
    tensor: GpuTensor,
    pub(crate) images: usize,
    pub(crate) frames: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) channels: usize,
    /// Elements from an image to the next.
    pub(crate) image_stride: usize,
}

impl Pictures {
    /// A whole tensor `[images, frames, height, width, channels]`.
    ///
    /// # Errors
    /// `Argument` for another rank.
    pub fn new(tensor: &GpuTensor) -> Result<Self> {
        let &[images, frames, height, width, channels] = tensor.shape() else {
            let expected = "[images, frames, height, width, channels]";
            return Err(shape("Pictures::new", "tensor", expected, tensor.shape()));
        };
        let image_stride = frames * height * width * channels;
        Ok(Self {
            tensor: tensor.clone(),
            images,
            frames,
            height,
            width,
            channels,
            image_stride,
        })
    }

    /// Pictures of one frame among the rows `[rows, channels]`: image `i` begins at row `first + i * distance`
    /// and has `height * width` rows.
    ///
    /// # Errors
    /// `Argument` when the rows are not there or pictures overlap.
    pub fn among_rows(
        rows: &GpuTensor,
        (first, distance): (usize, usize),
        images: usize,
        (height, width): (usize, usize),
    ) -> Result<Self> {
        const OP: &str = "Pictures::among_rows";
        let &[total, channels] = rows.shape() else {
            return Err(shape(OP, "rows", "[rows, channels]", rows.shape()));
        };
        let size = height.checked_mul(width);
        let last = images.saturating_sub(1).checked_mul(distance);
        let end = size
            .zip(last)
            .and_then(|(size, last)| first.checked_add(last)?.checked_add(size));
        if end.is_none_or(|end| end > total) || (images > 1 && size.is_none_or(|s| s > distance)) {
            return Err(shape(OP, "rows", "a row for every pixel", rows.shape()));
        }
        let count = total - first;
        let tensor = rows.narrow0(first, count)?;
        let image_stride = if images > 1 { distance } else { height * width } * channels;
        Ok(Self {
            tensor,
            images,
            frames: 1,
            height,
            width,
            channels,
            image_stride,
        })
    }

    /// Frames from `first` on of a single clip.
    ///
    /// # Errors
    /// `Argument` for several images, or when the frame is not there.
    pub fn frames_from(&self, first: usize) -> Result<Self> {
        const OP: &str = "Pictures::frames_from";
        if self.images != 1 || first >= self.frames {
            return Err(argument(OP, "first", "is not a frame of one clip"));
        }
        let frame = self.height * self.width * self.channels;
        let flat = self.tensor.reshape(&[self.tensor.numel()])?;
        let tensor = flat.narrow0(first * frame, (self.frames - first) * frame)?;
        let frames = self.frames - first;
        Ok(Self {
            tensor,
            frames,
            image_stride: frames * frame,
            ..self.clone()
        })
    }

    /// Images, frames, height, width, channels.
    #[must_use]
    pub fn size(&self) -> [usize; 5] {
        [
            self.images,
            self.frames,
            self.height,
            self.width,
            self.channels,
        ]
    }

    /// Pixels of all frames of an image.
    #[must_use]
    pub fn pixels(&self) -> usize {
        self.frames * self.height * self.width
    }

    /// Element type.
    #[must_use]
    pub fn dtype(&self) -> GpuType {
        self.tensor.dtype()
    }

    /// The elements, from the first pixel on.
    #[must_use]
    pub fn tensor(&self) -> &GpuTensor {
        &self.tensor
    }

    /// All pixels of an image in a row, `[images, 1, 1, pixels, channels]`: what 1x1 windows see.
    #[must_use]
    pub fn in_a_row(&self) -> Self {
        Self {
            frames: 1,
            height: 1,
            width: self.pixels(),
            ..self.clone()
        }
    }

    /// Refuses other than 16-bit floats in rows of whole 16-byte pieces.
    pub(crate) fn expect_half(&self, op: &'static str, what: &'static str) -> Result<&'static str> {
        let aligned = self.tensor.address().is_multiple_of(16);
        if !self.channels.is_multiple_of(CHANNEL_STEP) || !aligned {
            let expected = "channels in multiples of 8, aligned to 16 bytes";
            return Err(shape(op, what, expected, &self.size()));
        }
        suffix(op, what, self.dtype())
    }

    /// Refuses another size or type by name.
    pub(crate) fn expect_size(
        &self,
        op: &'static str,
        what: &'static str,
        size: [usize; 5],
        dtype: GpuType,
    ) -> Result<()> {
        if self.size() == size && self.dtype() == dtype {
            return Ok(());
        }
        let expected = format!("{dtype:?} {size:?}, not {:?}", self.dtype());
        Err(shape(op, what, expected, &self.size()))
    }
}

/// How kernels for a 16-bit type are named.
pub(crate) fn suffix(op: &'static str, what: &'static str, dtype: GpuType) -> Result<&'static str> {
    match dtype {
        GpuType::Bf16 => Ok("bf16"),
        GpuType::F16 => Ok("f16"),
        _ => Err(argument(op, what, "must be bf16 or f16")),
    }
}

/// Weight of a convolution in the order of the kernel, `[taps, c_out, c_in]`, and its bias.
#[derive(Clone, Debug)]
pub struct GpuConvWeight {
    pub(crate) packed: GpuTensor,
    pub(crate) bias: Option<GpuTensor>,
    /// 1, or 3: the window spans frames.
    pub(crate) time_taps: usize,
    /// 1 or 3.
    pub(crate) side: usize,
}

impl GpuConvWeight {
    /// From a checkpoint tensor `w [out, in, kh, kw]` or `[out, in, kt, kh, kw]`, F32 or bf16, in `dtype`
    /// (bf16 or f16). Windows are 1x1, 3x3, 1x1x1 or 3x3x3; missing input channels up to a multiple of 8 are
    /// zero. `bias` is F32 `[out]`.
    ///
    /// # Errors
    /// `Argument` for other windows or types; `OutOfMemory`; or what the driver says.
    pub fn pack(w: &GpuTensor, bias: Option<&GpuTensor>, dtype: GpuType) -> Result<Self> {
        const OP: &str = "conv weight";
        let (out, input, time_taps, side) = match *w.shape() {
            [out, input, kh, kw] if kh == kw => (out, input, 1, kh),
            [out, input, kt, kh, kw] if kh == kw && (kt == 1 || kt == kh) => (out, input, kt, kh),
            _ => {
                return Err(shape(
                    OP,
                    "w",
                    "[out, in, 1 or 3 in all directions]",
                    w.shape(),
                ));
            }
        };
        if !matches!(side, 1 | 3) || out == 0 || input == 0 {
            return Err(shape(
                OP,
                "w",
                "[out, in, 1 or 3 in all directions]",
                w.shape(),
            ));
        }
        check_bias(OP, bias, out)?;
        let name = match (w.dtype(), suffix(OP, "dtype", dtype)?) {
            (GpuType::F32, "bf16") => "conv_pack_f32_bf16",
            (GpuType::F32, _) => "conv_pack_f32_f16",
            (GpuType::Bf16, "bf16") => "conv_pack_bf16_bf16",
            (GpuType::Bf16, _) => "conv_pack_bf16_f16",
            _ => return Err(argument(OP, "w", "must be f32 or bf16")),
        };
        let wide = input.next_multiple_of(CHANNEL_STEP);
        let taps = time_taps * side * side;
        let gpu = w.gpu();
        let packed = GpuTensor::new(gpu, &[taps, out, wide], dtype, "convolution weight")?;
        let kernel = gpu.kernel("vae", name, 0)?;
        let (from, to) = (w.address(), packed.address());
        let sizes = [
            int(OP, "w", out)?,
            int(OP, "w", input)?,
            int(OP, "w", wide)?,
            int(OP, "w", taps)?,
        ];
        let mut launch = gpu.stream().launch_builder(&kernel);
        launch.arg(&from).arg(&to);
        for size in &sizes {
            launch.arg(size);
        }
        // SAFETY: arguments are those of the kernel, which reads all of `w` and writes all of `packed`.
        unsafe { launch.launch(elementwise(gpu.multiprocessors(), packed.numel())) }?;
        Ok(Self {
            packed,
            bias: bias.cloned(),
            time_taps,
            side,
        })
    }

    /// A matrix `[out, in]` of bf16 or f16 as a 1x1 window, where it lies; `in` is a multiple of 8.
    ///
    /// # Errors
    /// `Argument` for another rank, type or size.
    pub fn matrix(w: &GpuTensor, bias: Option<&GpuTensor>) -> Result<Self> {
        const OP: &str = "conv matrix";
        let &[out, input] = w.shape() else {
            return Err(shape(OP, "w", "[out, in]", w.shape()));
        };
        suffix(OP, "w", w.dtype())?;
        if !input.is_multiple_of(CHANNEL_STEP) || !w.address().is_multiple_of(16) {
            return Err(shape(OP, "w", "rows of whole 16-byte pieces", w.shape()));
        }
        check_bias(OP, bias, out)?;
        let packed = w.reshape(&[1, out, input])?;
        Ok(Self {
            packed,
            bias: bias.cloned(),
            time_taps: 1,
            side: 1,
        })
    }

    /// Input channels, with those added to fill a multiple of 8.
    #[must_use]
    pub fn c_in(&self) -> usize {
        self.packed.dim(2)
    }

    /// Output channels.
    #[must_use]
    pub fn c_out(&self) -> usize {
        self.packed.dim(1)
    }

    /// Its elements, `[taps, out, in]`; a 1x1 window is the matrix `[1, out, in]`.
    #[must_use]
    pub fn packed(&self) -> &GpuTensor {
        &self.packed
    }

    /// Device memory of the weight, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.packed.bytes() + self.bias.as_ref().map_or(0, GpuTensor::bytes)
    }
}

fn check_bias(op: &'static str, bias: Option<&GpuTensor>, out: usize) -> Result<()> {
    let Some(bias) = bias else { return Ok(()) };
    bias.expect(op, "bias", &[out], GpuType::F32)?;
    if bias.address().is_multiple_of(8) {
        return Ok(());
    }
    Err(argument(op, "bias", "is not aligned to 8 bytes"))
}

/// Blocks for `count` elements, one each or several in turn.
pub(crate) fn elementwise(multiprocessors: u32, count: usize) -> LaunchConfig {
    const THREADS: u32 = 256;
    const WAVES: u32 = 8;
    let blocks = u32::try_from(count.div_ceil(THREADS as usize)).unwrap_or(u32::MAX);
    LaunchConfig {
        grid_dim: (blocks.clamp(1, WAVES * multiprocessors), 1, 1),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// Sums and sums of squares of a tensor's channels over parts of its images, on the way to a group norm.
#[derive(Clone, Debug)]
pub struct ChannelSums {
    /// F32 pairs `[images, channels / per, units]`.
    pub(crate) partials: GpuTensor,
    pub(crate) images: usize,
    pub(crate) channels: usize,
    /// Channels summed together.
    pub(crate) per: usize,
    /// Parts of an image.
    pub(crate) units: usize,
}

impl ChannelSums {
    /// Pairs take the front of `scratch`, F32 of any shape.
    pub(crate) fn within(
        op: &'static str,
        scratch: &GpuTensor,
        [images, channels, per, units]: [usize; 4],
    ) -> Result<Self> {
        let needed = images * (channels / per) * units * 2;
        if scratch.dtype() != GpuType::F32 || scratch.numel() < needed {
            let expected = format!("F32, at least {needed} elements");
            return Err(shape(op, "sums", expected, scratch.shape()));
        }
        let partials = scratch.reshape(&[scratch.numel()])?.narrow0(0, needed)?;
        Ok(Self {
            partials,
            images,
            channels,
            per,
            units,
        })
    }
}

/// Refuses operands on different GPUs.
pub(crate) fn same_gpu(op: &'static str, tensors: &[&GpuTensor]) -> Result<()> {
    let mut ordinals = tensors.iter().map(|t| t.gpu().ordinal());
    let first = ordinals.next();
    if ordinals.all(|o| Some(o) == first) {
        return Ok(());
    }
    Err(CudaError::from(crate::error::KernelError::Argument {
        op,
        what: "operands",
        reason: "lie on different gpus",
    }))
}
