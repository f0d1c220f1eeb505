//! Models of random weights, for measurements without a checkpoint.
//!
//! Equal seeds and configs give equal weights, on every machine and for every number of threads.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use half::bf16;
use kernels::Tensor;
use rayon::prelude::*;
use serde_json::{Map, json};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::model::{LoadOptions, Model};
use crate::source::WeightSource;
use crate::weights::{Checkpoint, SINGLE_FILE, expected_tensors};

/// Values that one piece of parallel work makes.
const CHUNK: usize = 1 << 16;
/// How names of the weights that choose experts end, `[experts, hidden]`.
const ROUTER: &str = "gate.wg.weight";

/// Makes every weight from its name and a seed.
#[derive(Clone, Copy, Debug)]
struct RandomWeights {
    seed: u64,
    /// How much longer the rows of a router are that draw tokens to the first half of the experts; 0: not at all.
    skew: f32,
}

impl WeightSource for RandomWeights {
    fn value_bytes(&self, _name: &str) -> usize {
        size_of::<bf16>()
    }

    /// Matrices and convolutions: uniform with variance 1 / fan-in, BF16 as released checkpoints store them.
    /// Norm weights are 1 and biases 0, F32.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
        let numel = shape
            .iter()
            .try_fold(1_usize, |n, d| n.checked_mul(*d))
            .ok_or_else(|| ModelError::tensor(name, "cannot be addressed"))?;
        if shape.len() < 2 {
            let value = if name.ends_with("bias") { 0.0 } else { 1.0 };
            return Ok(Tensor::from_f32(shape, vec![value; numel])?);
        }
        let scale = random_scale(shape);
        let (skew, width) = (self.skew, shape[1..].iter().product::<usize>().max(1));
        // A token is drawn to one of two opposite rows, whatever it is: the first half of the experts are such pairs.
        let router = skew > 0.0 && name.ends_with(ROUTER);
        let drawn = |index: usize| {
            let row = index / width;
            match (router && row < shape[0] / 2, row % 2) {
                (true, 0) => (index, 1.0 + skew),
                (true, _) => (index - width, -1.0 - skew),
                (false, _) => (index, 1.0),
            }
        };
        let key = self.seed ^ name_hash(name);
        let mut data = vec![bf16::ZERO; numel];
        data.par_chunks_mut(CHUNK)
            .enumerate()
            .for_each(|(chunk, values)| {
                for (value, index) in values.iter_mut().zip(chunk * CHUNK..) {
                    let (index, grown) = drawn(index);
                    *value = bf16::from_f32(unit(key, index as u64) * scale * grown);
                }
            });
        Ok(Tensor::from_bf16(shape, data)?)
    }
}

/// Half width of the values of a matrix or convolution of this shape.
pub(crate) fn random_scale(shape: &[usize]) -> f32 {
    let fan_in: usize = shape[1..].iter().product();
    // A uniform distribution over [-a, a] has variance a^2 / 3.
    (3.0 / fan_in.max(1) as f32).sqrt()
}

/// The first eight bytes of the name's BLAKE3 digest.
pub(crate) fn name_hash(name: &str) -> u64 {
    let digest = blake3::hash(name.as_bytes());
    let (words, _) = digest.as_bytes().as_chunks::<8>();
    u64::from_le_bytes(words[0])
}

/// Value `index` of stream `key` in [-1, 1): the SplitMix64 output function over a counter.
fn unit(key: u64, index: u64) -> f32 {
    let mut z = key.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    // 24 bits are what an f32 holds exactly.
    (z >> 40) as f32 / (1_u32 << 23) as f32 - 1.0
}

impl Model {
    /// A model of `config` with random weights and without a tokenizer: it denoises and decodes, but cannot
    /// lay a prompt out.
    ///
    /// # Errors
    /// Those of building the parts: `Internal` for a defect, `Unimplemented` for what is not built.
    pub fn random(
        config: ModelConfig,
        options: LoadOptions,
        seed: u64,
    ) -> Result<Self, ModelError> {
        Self::random_skewed(config, options, (seed, 0.0))
    }

    /// Like [`Model::random`], with a first half of the experts that most tokens choose: in routers, rows of that half
    /// are 1 + `skew` times as long, and every second one is the opposite of the one before.
    ///
    /// # Errors
    /// Those of [`Model::random`].
    pub fn random_skewed(
        config: ModelConfig,
        options: LoadOptions,
        (seed, skew): (u64, f32),
    ) -> Result<Self, ModelError> {
        let weights = RandomWeights { seed, skew };
        let name = format!("random-{seed}");
        Self::build(config, Arc::new(weights), options, name)
    }

    /// The same model from a checkpoint file that is written into `dir` first, so that layers can be read
    /// from it.
    ///
    /// # Errors
    /// Those of [`Model::random`]; `CheckpointFile` when it cannot be written or there is one already.
    pub fn random_stored(
        config: ModelConfig,
        options: LoadOptions,
        seed: u64,
        dir: &Path,
    ) -> Result<Self, ModelError> {
        let skew = 0.0;
        RandomWeights { seed, skew }.store(&config, dir)?;
        Self::stored(config, options, dir)
    }

    /// A model without a tokenizer whose weights are in `dir`.
    ///
    /// # Errors
    /// A bad checkpoint; those of building the parts.
    pub fn stored(
        config: ModelConfig,
        options: LoadOptions,
        dir: &Path,
    ) -> Result<Self, ModelError> {
        let stored = Checkpoint::open(dir)?;
        stored.verify(&expected_tensors(&config))?;
        Self::build(config, Arc::new(stored), options, "stored".to_owned())
    }
}

impl RandomWeights {
    /// Writes every tensor of a model as one safetensors file.
    fn store(&self, config: &ModelConfig, dir: &Path) -> Result<(), ModelError> {
        let failed =
            |e: std::io::Error| ModelError::file(SINGLE_FILE, format!("cannot be written: {e}"));
        let (mut header, mut end) = (Map::new(), 0);
        let tensors = expected_tensors(config);
        for spec in &tensors {
            let matrix = spec.shape.len() >= 2;
            let (dtype, width) = if matrix { ("BF16", 2) } else { ("F32", 4) };
            let start = end;
            end += spec.shape.iter().product::<usize>() * width;
            let entry =
                json!({ "dtype": dtype, "shape": spec.shape, "data_offsets": [start, end] });
            header.insert(spec.name.clone(), entry);
        }
        let header = serde_json::Value::Object(header).to_string();
        let file = File::create_new(dir.join(SINGLE_FILE)).map_err(failed)?;
        let mut file = BufWriter::new(file);
        file.write_all(&(header.len() as u64).to_le_bytes())
            .map_err(failed)?;
        file.write_all(header.as_bytes()).map_err(failed)?;
        for spec in &tensors {
            let tensor = self.tensor(&spec.name, &spec.shape)?;
            let written = match tensor.as_bf16() {
                Ok(values) => file.write_all(bytemuck::cast_slice(values)),
                Err(_) => file.write_all(bytemuck::cast_slice(tensor.as_f32()?)),
            };
            written.map_err(failed)?;
        }
        file.flush().map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use serde_json::json;

    use super::*;
    use crate::model::Parts;

    /// Notes the name and shape of every tensor that is asked for.
    #[derive(Default)]
    struct Noting(Mutex<BTreeMap<String, Vec<usize>>>);

    impl WeightSource for Noting {
        fn value_bytes(&self, _name: &str) -> usize {
            2
        }

        fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor, ModelError> {
            self.0.lock().unwrap().insert(name.into(), shape.to_vec());
            RandomWeights { seed: 0, skew: 0.0 }.tensor(name, shape)
        }
    }

    /// A small model whose stem is `inner` channels wide, the residual stream 64.
    fn config(inner: usize, plain: bool) -> ModelConfig {
        let config = json!({
            "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 3, "attention_head_dim": 8,
            "moe_intermediate_size": [8, 24], "num_experts": [3, 5], "moe_topk": [1, 4],
            "use_mixed_mlp_moe": !plain, "num_shared_expert": [2, 1], "use_qk_norm": !plain,
            "max_position_embeddings": 300, "patch_embed_hidden_dim": inner,
            "image_base_size": 64, "cfg_distilled": plain, "use_meanflow": plain,
            "vae": {
                "latent_channels": 4, "block_out_channels": [32, 64, 64, 32],
                "layers_per_block": 2, "ffactor_spatial": 8, "ffactor_temporal": 2,
                "sample_size": 64, "scaling_factor": 0.5,
            },
            "vit": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                "num_attention_heads": 2, "patch_size": 8, "num_patches": 9,
            },
            "vit_processor": { "max_num_patches": 16 },
            "vit_aligner": {
                "projector_type": "mlp_gelu", "input_dim": 16, "n_embed": 64, "depth": 3,
            },
        });
        ModelConfig::parse(&config, &json!({})).unwrap()
    }

    #[test]
    fn a_model_reads_exactly_the_tensors_that_its_checkpoint_must_have() {
        // Equal widths: the residual block of stem and head has no skip convolution.
        for (inner, plain) in [(32, false), (64, false), (64, true)] {
            let config = config(inner, plain);
            let expected: BTreeMap<String, Vec<usize>> = expected_tensors(&config)
                .into_iter()
                .map(|spec| (spec.name, spec.shape))
                .collect();
            let source = Arc::new(Noting::default());
            let options = LoadOptions {
                parts: Parts::ALL,
                ..LoadOptions::default()
            };
            Model::build(config, source.clone(), options, "noted".into()).unwrap();
            let noted = source.0.lock().unwrap();
            assert_eq!(*noted, expected, "inner width {inner}");
        }
    }

    #[test]
    fn weights_depend_on_name_and_seed_and_have_the_stated_variance() {
        let make = |seed, name: &str| {
            let source = RandomWeights { seed, skew: 0.0 };
            source.tensor(name, &[300, 400]).unwrap().to_f32_vec()
        };
        let values = make(1, "a.weight");
        assert_eq!(values, make(1, "a.weight"));
        assert_ne!(values, make(2, "a.weight"));
        assert_ne!(values, make(1, "b.weight"));
        let n = values.len() as f32;
        let mean = values.iter().sum::<f32>() / n;
        let variance = values.iter().map(|v| v * v).sum::<f32>() / n;
        assert!(mean.abs() < 1e-3, "{mean}");
        assert!((variance * 400.0 - 1.0).abs() < 0.02, "{variance}");
    }

    #[test]
    fn norms_are_one_and_biases_zero() {
        let source = RandomWeights { seed: 1, skew: 0.0 };
        assert_eq!(
            source.tensor("n.weight", &[3]).unwrap().to_f32_vec(),
            [1.0; 3]
        );
        assert_eq!(
            source.tensor("n.bias", &[3]).unwrap().to_f32_vec(),
            [0.0; 3]
        );
    }

    #[test]
    fn a_skew_lengthens_the_rows_of_routers_and_nothing_else() {
        let of = |skew: f32, name: &str| {
            let source = RandomWeights { seed: 3, skew };
            source.tensor(name, &[4, 64]).unwrap().to_f32_vec()
        };
        let router = "model.layers.0.mlp.gate.wg.weight";
        let (even, skewed) = (of(0.0, router), of(1.0, router));
        // Of four experts the first two are a pair, the others as they were.
        for (index, b) in skewed.iter().enumerate() {
            let want = match index / 64 {
                0 => 2.0 * even[index],
                1 => -2.0 * even[index - 64],
                _ => even[index],
            };
            assert!((b - want).abs() <= want.abs() / 64.0, "{index}: {b} {want}");
        }
        let other = "model.layers.0.mlp.shared_mlp.down_proj.weight";
        assert_eq!(of(0.0, other), of(1.0, other));
    }
}
