//! SigLIP2 and the aligner on the device: bf16 products with fp32 sums, the residual stream in bf16.

use std::sync::Arc;

use half::bf16;
use kernels::Tensor;
use kernels::cuda::{
    Activation, Finish, Gpu, GpuLayerNorm, GpuTensor, GpuType, WholeAttention, add_layer_norm,
    bias_activation, gemm, layer_norm,
};

use super::convs::{From, GpuAffine};
use super::scratch::{Parts, Scratch, part_bytes};
use super::time::BiasedLinear;
use crate::config::{ModelConfig, VitConfig};
use crate::error::ModelError;
use crate::vit::{Patches, positions, real_patches, spread};

/// The vision transformer and its aligner on one GPU.
#[derive(Debug)]
pub(super) struct GpuVit {
    gpu: Arc<Gpu>,
    config: VitConfig,
    max_patches: usize,
    patch: GpuTensor,
    /// F32 `[hidden]`, on the host: it joins the positions there.
    patch_bias: Vec<f32>,
    positions: Tensor,
    layers: Vec<Layer>,
    post_norm: GpuAffine,
    aligner: Vec<BiasedLinear>,
    scratch: Scratch,
    /// Of the last picture: most have one size.
    attention: Option<WholeAttention>,
}

#[derive(Debug)]
struct Layer {
    norm1: GpuAffine,
    /// bf16 `[3 hidden, hidden]` and F32 `[3 hidden]`: queries, keys, values.
    qkv: (GpuTensor, GpuTensor),
    out: BiasedLinear,
    norm2: GpuAffine,
    fc1: BiasedLinear,
    fc2: BiasedLinear,
}

/// Activations of a pass.
struct Room {
    x: GpuTensor,
    h: GpuTensor,
    y: GpuTensor,
    /// F32 sums of products that an activation follows.
    sums: GpuTensor,
    mixed: GpuTensor,
    inner: GpuTensor,
}

impl GpuVit {
    pub(super) fn load(from: From<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let vit = config.vit.clone();
        let (gpu, hidden) = (from.gpu, vit.hidden_size);
        let at = |name: &str| format!("vision_model.embeddings.{name}");
        let positions = [vit.position_grid * vit.position_grid, hidden];
        let patch = [hidden, vit.patch_values()];
        let bias = from
            .source
            .host(gpu, &at("patch_embedding.bias"), &[hidden])?;
        let aligner = (0..config.vit_aligner.depth).map(|i| {
            let of = &config.vit_aligner;
            let input = if i == 0 { of.input_dim } else { of.output_dim };
            let name = format!("vision_aligner.layers.{}", 2 * i);
            BiasedLinear::load(gpu, from.source, &name, [of.output_dim, input])
        });
        Ok(Self {
            gpu: gpu.clone(),
            max_patches: config.vit_processor.max_num_patches,
            patch: from
                .source
                .bf16(gpu, &at("patch_embedding.weight"), &patch)?,
            patch_bias: bias.to_f32_vec(),
            positions: from
                .source
                .host(gpu, &at("position_embedding.weight"), &positions)?,
            layers: (0..vit.num_layers)
                .map(|layer| Layer::load(from, &vit, layer))
                .collect::<Result<_, _>>()?,
            post_norm: from.affine("vision_model.post_layernorm", hidden)?,
            aligner: aligner.collect::<Result<_, _>>()?,
            scratch: Scratch::new(gpu, "scratch of the vision transformer"),
            attention: None,
            config: vit,
        })
    }

    /// Features in the decoder's width, bf16 `[tokens, hidden]` on the host, as [`crate::vit::Vit::forward`] gives them.
    pub(super) fn forward(&mut self, patches: Patches<'_>) -> Result<Tensor, ModelError> {
        let real = real_patches(patches, self.max_patches)?;
        // One token stands for all that have no patch.
        let tokens = real + usize::from(real < self.max_patches);
        let bytes = self.bytes(tokens);
        let mut parts = self.scratch.parts(bytes)?;
        let room = self.room(tokens, &mut parts)?;
        self.embed(patches, (real, tokens), &room)?;
        let known = self.attention.take();
        let attention = match known.filter(|known| known.size() == (tokens, real)) {
            Some(known) => known,
            None => {
                let heads = (self.config.num_heads, self.config.head_dim());
                WholeAttention::new(&self.gpu, heads, (tokens, real))?
            }
        };
        for (index, layer) in self.layers.iter().enumerate() {
            if index == 0 {
                layer_norm(&room.x, self.norm(&layer.norm1), &room.h)?;
            }
            let next = self.layers.get(index + 1);
            let next = next.map_or(&self.post_norm, |next| &next.norm1);
            self.layer(layer, &attention, next, &room)?;
        }
        self.attention = Some(attention);
        let mut features = room.h;
        for (index, linear) in self.aligner.iter().enumerate() {
            let activation = if index + 1 < self.aligner.len() {
                Activation::GeluErf
            } else {
                Activation::None
            };
            features = linear.forward(&features, activation, GpuType::Bf16)?;
        }
        spread(&on_host(&features)?, real, self.max_patches)
    }

    /// Patches and their positions into the residual stream; the token without a patch has the first position.
    fn embed(
        &self,
        patches: Patches<'_>,
        (real, tokens): (usize, usize),
        room: &Room,
    ) -> Result<(), ModelError> {
        let (hidden, width) = (self.config.hidden_size, self.config.patch_values());
        let values = patches.values.narrow0(0, real)?;
        let blank = Tensor::zeros(&[tokens - real, width])?;
        let values = Tensor::concat0(&[&values, &blank])?;
        let narrow = GpuTensor::bf16_from_host(&self.gpu, &values, "patches")?;
        let mut added =
            positions::resize(&self.positions, self.config.position_grid, patches.grid)?;
        added.extend_from_within(..(tokens - real) * hidden);
        for row in added.chunks_exact_mut(hidden) {
            let both = row.iter_mut().zip(&self.patch_bias);
            both.for_each(|(value, bias)| *value += bias);
        }
        let sums = part(&room.sums, tokens, hidden)?;
        gemm(&sums, &narrow, &self.patch, Finish::Store)?;
        // Every element has a bias of its own.
        let all = [1, tokens * hidden];
        let added = GpuTensor::from_f32(&self.gpu, &all[1..], &added, "positions")?;
        let (x, sums) = (room.x.reshape(&all)?, sums.reshape(&all)?);
        Ok(bias_activation(&x, &sums, Some(&added), Activation::None)?)
    }

    /// One layer, and the norm that follows it, into `room.h`.
    fn layer(
        &self,
        layer: &Layer,
        attention: &WholeAttention,
        next: &GpuAffine,
        room: &Room,
    ) -> Result<(), ModelError> {
        let tokens = room.x.dim(0);
        let scale = (self.config.head_dim() as f32).sqrt().recip();
        let (weight, bias) = &layer.qkv;
        let sums = part(&room.sums, tokens, weight.dim(0))?;
        gemm(&sums, &room.h, weight, Finish::Store)?;
        attention.run(&room.mixed, (&sums, Some(bias)), scale)?;
        gemm(&room.y, &room.mixed, &layer.out.weight, Finish::Store)?;
        let (norm, bias) = (self.norm(&layer.norm2), Some(&layer.out.bias));
        add_layer_norm(&room.x, (&room.y, bias), norm, &room.h)?;
        let sums = part(&room.sums, tokens, self.config.intermediate_size)?;
        gemm(&sums, &room.h, &layer.fc1.weight, Finish::Store)?;
        let bias = Some(&layer.fc1.bias);
        bias_activation(&room.inner, &sums, bias, Activation::GeluTanh)?;
        gemm(&room.y, &room.inner, &layer.fc2.weight, Finish::Store)?;
        let bias = Some(&layer.fc2.bias);
        Ok(add_layer_norm(
            &room.x,
            (&room.y, bias),
            self.norm(next),
            &room.h,
        )?)
    }

    fn norm<'a>(&self, affine: &'a GpuAffine) -> GpuLayerNorm<'a> {
        GpuLayerNorm {
            weight: &affine.weight,
            bias: &affine.bias,
            eps: self.config.layer_norm_eps as f32,
        }
    }

    /// Columns of the widest F32 sum.
    fn widest(&self) -> usize {
        (3 * self.config.hidden_size).max(self.config.intermediate_size)
    }

    fn bytes(&self, tokens: usize) -> usize {
        let (hidden, inner) = (self.config.hidden_size, self.config.intermediate_size);
        4 * part_bytes(tokens * hidden, GpuType::Bf16)
            + part_bytes(tokens * inner, GpuType::Bf16)
            + part_bytes(tokens * self.widest(), GpuType::F32)
    }

    fn room(&self, tokens: usize, parts: &mut Parts) -> Result<Room, ModelError> {
        let hidden = self.config.hidden_size;
        let mut narrow = |width: usize| parts.take(&[tokens, width], GpuType::Bf16);
        Ok(Room {
            x: narrow(hidden)?,
            h: narrow(hidden)?,
            y: narrow(hidden)?,
            mixed: narrow(hidden)?,
            inner: narrow(self.config.intermediate_size)?,
            sums: parts.take(&[tokens * self.widest()], GpuType::F32)?,
        })
    }
}

/// The first `rows * width` elements of `sums` as a matrix.
fn part(sums: &GpuTensor, rows: usize, width: usize) -> Result<GpuTensor, ModelError> {
    Ok(sums.narrow0(0, rows * width)?.reshape(&[rows, width])?)
}

/// A bf16 tensor on the host, as it is.
pub(super) fn on_host(tensor: &GpuTensor) -> Result<Tensor, ModelError> {
    let mut values = vec![bf16::ZERO; tensor.numel()];
    let bytes = bytemuck::cast_slice_mut(&mut values);
    tensor.buffer().read(tensor.offset(), bytes)?;
    Ok(Tensor::from_bf16(tensor.shape(), values)?)
}

impl Layer {
    fn load(from: From<'_>, config: &VitConfig, layer: usize) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let at = |name: &str| format!("vision_model.encoder.layers.{layer}.{name}");
        let weight = GpuTensor::new(from.gpu, &[3 * hidden, hidden], GpuType::Bf16, "weights")?;
        let mut bias = Vec::with_capacity(3 * hidden);
        for (index, name) in ["q_proj", "k_proj", "v_proj"].into_iter().enumerate() {
            let name = |kind: &str| at(&format!("self_attn.{name}.{kind}"));
            let part = weight.narrow0(index * hidden, hidden)?;
            let shape = [hidden, hidden];
            from.source.fill(&name("weight"), &shape, &part)?;
            let own = from.source.host(from.gpu, &name("bias"), &[hidden])?;
            bias.extend(own.to_f32_vec());
        }
        let linear =
            |name: &str, sizes| BiasedLinear::load(from.gpu, from.source, &at(name), sizes);
        Ok(Self {
            norm1: from.affine(&at("layer_norm1"), hidden)?,
            qkv: (
                weight,
                GpuTensor::from_f32(from.gpu, &[3 * hidden], &bias, "weights")?,
            ),
            out: linear("self_attn.out_proj", [hidden, hidden])?,
            norm2: from.affine(&at("layer_norm2"), hidden)?,
            fc1: linear("mlp.fc1", [inner, hidden])?,
            fc2: linear("mlp.fc2", [hidden, inner])?,
        })
    }
}
