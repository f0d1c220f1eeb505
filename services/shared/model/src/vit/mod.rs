//! SigLIP2: patches of a picture to features, and the aligner that takes them to the decoder's width.

pub(crate) mod positions;

use kernels::{
    LinearWeight, Tensor, add, add_assign, gelu_erf, gelu_tanh, layer_norm, linear, mha,
};

use crate::config::{AlignerConfig, ModelConfig, VitConfig};
use crate::error::ModelError;
use crate::source::{Affine, Scope};

/// The vision transformer and its aligner.
///
/// The sequence gives every picture the same number of tokens. Tokens without a patch are computed like
/// the others (they see the real patches, nothing sees them) and are all alike, so one of them is computed
/// and copied.
#[derive(Debug)]
pub struct Vit {
    config: VitConfig,
    max_patches: usize,
    patch: LinearWeight,
    positions: Tensor,
    layers: Vec<Layer>,
    post_norm: Affine,
    aligner: Vec<LinearWeight>,
}

/// One pre-norm encoder layer.
#[derive(Debug)]
struct Layer {
    norm1: Affine,
    q: LinearWeight,
    k: LinearWeight,
    v: LinearWeight,
    out: LinearWeight,
    norm2: Affine,
    fc1: LinearWeight,
    fc2: LinearWeight,
}

/// The patches of one picture.
#[derive(Clone, Copy, Debug)]
pub struct Patches<'a> {
    /// At least `grid.0 * grid.1` rows of one flattened patch each; rows after those are ignored.
    pub values: &'a Tensor,
    /// Patch rows and columns.
    pub grid: (usize, usize),
}

impl Vit {
    pub(crate) fn load(root: &Scope<'_>, config: &ModelConfig) -> Result<Self, ModelError> {
        let vit = config.vit.clone();
        let scope = root.child("vision_model");
        let embeddings = scope.child("embeddings");
        let layers = scope.child("encoder.layers");
        let grid = vit.position_grid * vit.position_grid;
        Ok(Self {
            patch: embeddings
                .child("patch_embedding")
                .linear_bias(vit.patch_values(), vit.hidden_size)?,
            positions: embeddings
                .child("position_embedding")
                .f32("weight", &[grid, vit.hidden_size])?,
            layers: (0..vit.num_layers)
                .map(|l| Layer::load(&layers.child(l), &vit))
                .collect::<Result<_, _>>()?,
            post_norm: scope.child("post_layernorm").affine(vit.hidden_size)?,
            aligner: load_aligner(&root.child("vision_aligner.layers"), &config.vit_aligner)?,
            max_patches: config.vit_processor.max_num_patches,
            config: vit,
        })
    }

    /// Tokens of every picture in the sequence.
    pub fn tokens(&self) -> usize {
        self.max_patches
    }

    /// Features in the decoder's width, `[tokens, hidden]`. `see` gets named inner states.
    ///
    /// # Errors
    /// `Internal` when the grid does not fit.
    pub fn forward(
        &self,
        patches: Patches<'_>,
        see: &mut dyn FnMut(&str, &Tensor),
    ) -> Result<Tensor, ModelError> {
        let real = real_patches(patches, self.max_patches)?;
        let mut x = self.embed(patches, real)?;
        see("embeddings", &spread(&x, real, self.max_patches)?);
        for (index, layer) in self.layers.iter().enumerate() {
            layer.forward(&mut x, &self.config, real)?;
            see(
                &format!("layer{index}"),
                &spread(&x, real, self.max_patches)?,
            );
        }
        let (eps, norm) = (self.config.layer_norm_eps as f32, &self.post_norm);
        let mut x = layer_norm(&x, &norm.weight, &norm.bias, eps)?;
        see("last_hidden_state", &spread(&x, real, self.max_patches)?);
        for (index, weight) in self.aligner.iter().enumerate() {
            if index > 0 {
                x = gelu_erf(&x)?;
            }
            x = linear(&x, weight)?;
        }
        spread(&x, real, self.max_patches)
    }

    /// Real patches, then one token for all that have none: it gets the first position's vector.
    fn embed(&self, patches: Patches<'_>, real: usize) -> Result<Tensor, ModelError> {
        let spare = usize::from(real < self.max_patches);
        let values = patches.values.narrow0(0, real)?;
        let blank = Tensor::zeros(&[spare, self.config.patch_values()])?;
        let mut positions =
            positions::resize(&self.positions, self.config.position_grid, patches.grid)?;
        if spare > 0 {
            positions.extend_from_within(..self.config.hidden_size);
        }
        let x = linear(&Tensor::concat0(&[&values, &blank])?, &self.patch)?;
        Ok(add(&x, &Tensor::from_f32(x.shape(), positions)?)?)
    }
}

/// Number of real patches.
pub(crate) fn real_patches(patches: Patches<'_>, most: usize) -> Result<usize, ModelError> {
    let (rows, columns) = patches.grid;
    let real = rows.saturating_mul(columns);
    if real == 0 || real > most || real > patches.values.dim(0) {
        return Err(ModelError::Internal(format!(
            "vit grid {rows} x {columns} does not fit {} patches",
            most.min(patches.values.dim(0))
        )));
    }
    Ok(real)
}

/// `[real (+ 1), n]` to `[tokens, n]`: the token behind the real ones is copied.
pub(crate) fn spread(x: &Tensor, real: usize, tokens: usize) -> Result<Tensor, ModelError> {
    let (rows, width) = (x.dim(0), x.dim(1));
    let spare = real * width..(real + 1) * width;
    let dims = [tokens.max(rows), width];
    if let Ok(values) = x.as_bf16() {
        let mut values = values.to_vec();
        for _ in rows..tokens {
            values.extend_from_within(spare.clone());
        }
        return Ok(Tensor::from_bf16(&dims, values)?);
    }
    let mut values = x.to_f32_vec();
    for _ in rows..tokens {
        values.extend_from_within(spare.clone());
    }
    Ok(Tensor::from_f32(&dims, values)?)
}

impl Layer {
    fn load(scope: &Scope<'_>, config: &VitConfig) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let attention = |name: &str| {
            scope
                .child("self_attn")
                .child(name)
                .linear_bias(hidden, hidden)
        };
        Ok(Self {
            norm1: scope.child("layer_norm1").affine(hidden)?,
            q: attention("q_proj")?,
            k: attention("k_proj")?,
            v: attention("v_proj")?,
            out: attention("out_proj")?,
            norm2: scope.child("layer_norm2").affine(hidden)?,
            fc1: scope.child("mlp.fc1").linear_bias(hidden, inner)?,
            fc2: scope.child("mlp.fc2").linear_bias(inner, hidden)?,
        })
    }

    /// `x [tokens, hidden]`, keys only from the first `real` tokens.
    fn forward(&self, x: &mut Tensor, config: &VitConfig, real: usize) -> Result<(), ModelError> {
        let (eps, tokens) = (config.layer_norm_eps as f32, x.dim(0));
        let heads = [1, tokens, config.num_heads, config.head_dim()];
        let normed = layer_norm(x, &self.norm1.weight, &self.norm1.bias, eps)?;
        let project = |weight| Ok::<_, ModelError>(linear(&normed, weight)?.reshape(&heads)?);
        let scale = (config.head_dim() as f32).sqrt().recip();
        let mixed = mha(
            &project(&self.q)?,
            &project(&self.k)?,
            &project(&self.v)?,
            &[real],
            scale,
        )?;
        let mixed = mixed.reshape(&[tokens, config.hidden_size])?;
        add_assign(x, &linear(&mixed, &self.out)?)?;
        let normed = layer_norm(x, &self.norm2.weight, &self.norm2.bias, eps)?;
        let inner = gelu_tanh(&linear(&normed, &self.fc1)?)?;
        add_assign(x, &linear(&inner, &self.fc2)?)?;
        Ok(())
    }
}

/// `depth` linear layers named `0, 2, 4, ..`, a GELU between each two.
fn load_aligner(
    scope: &Scope<'_>,
    config: &AlignerConfig,
) -> Result<Vec<LinearWeight>, ModelError> {
    (0..config.depth)
        .map(|i| {
            let input = if i == 0 {
                config.input_dim
            } else {
                config.output_dim
            };
            scope.child(2 * i).linear_bias(input, config.output_dim)
        })
        .collect()
}
