//! The set of tensors that a config calls for, with the names and shapes of the released checkpoints.

use crate::config::{ModelConfig, VaeConfig};

/// Width of the sinusoid that every time embedder takes in.
pub const SINUSOID_WIDTH: usize = 256;

/// One tensor that should be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape in the checkpoint.
    pub shape: Vec<usize>,
    /// Whether the model works without it.
    pub optional: bool,
}

/// The pooling head of the vision transformer is in some checkpoints and unused in all.
pub fn is_tolerated_extra(name: &str) -> bool {
    name.starts_with("vision_model.head.")
}

/// Every tensor of the model, in no particular order.
pub fn expected_tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let mut set = Set::default();
    backbone(&mut set, config);
    time_embedders(&mut set, config);
    image_stem_and_head(&mut set, config);
    vae_encoder(&mut set, &config.vae);
    vae_decoder(&mut set, &config.vae);
    vision(&mut set, config);
    set.0
}

#[derive(Default)]
struct Set(Vec<TensorSpec>);

impl Set {
    fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.0.push(TensorSpec {
            name: name.into(),
            shape: shape.to_vec(),
            optional: false,
        });
    }

    /// A weight and a bias as long as the weight's first dimension.
    fn with_bias(&mut self, prefix: &str, shape: &[usize]) {
        self.add(format!("{prefix}.weight"), shape);
        self.add(format!("{prefix}.bias"), &shape[..1]);
    }

    fn norm(&mut self, prefix: &str, channels: usize) {
        self.with_bias(prefix, &[channels]);
    }

    /// A 3x3x3 convolution.
    fn conv3d(&mut self, prefix: &str, out: usize, input: usize) {
        self.with_bias(prefix, &[out, input, 3, 3, 3]);
    }
}

fn backbone(set: &mut Set, c: &ModelConfig) {
    let hidden = c.hidden_size;
    set.add("model.wte.weight", &[c.vocab_size, hidden]);
    set.add("lm_head.weight", &[c.vocab_size, hidden]);
    set.add("model.ln_f.weight", &[hidden]);
    for (l, moe) in c.layers.iter().enumerate() {
        let p = format!("model.layers.{l}");
        set.add(format!("{p}.input_layernorm.weight"), &[hidden]);
        set.add(format!("{p}.post_attention_layernorm.weight"), &[hidden]);
        let rows = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim;
        set.add(format!("{p}.self_attn.qkv_proj.weight"), &[rows, hidden]);
        set.add(
            format!("{p}.self_attn.o_proj.weight"),
            &[hidden, c.num_heads * c.head_dim],
        );
        if c.use_qk_norm {
            set.add(
                format!("{p}.self_attn.query_layernorm.weight"),
                &[c.head_dim],
            );
            set.add(format!("{p}.self_attn.key_layernorm.weight"), &[c.head_dim]);
        }
        set.add(format!("{p}.mlp.gate.wg.weight"), &[moe.experts, hidden]);
        if let Some(width) = moe.shared_intermediate {
            mlp(set, &format!("{p}.mlp.shared_mlp"), hidden, width);
        }
        for e in 0..moe.experts {
            mlp(
                set,
                &format!("{p}.mlp.experts.{e}"),
                hidden,
                moe.intermediate,
            );
        }
    }
}

fn mlp(set: &mut Set, prefix: &str, hidden: usize, width: usize) {
    set.add(
        format!("{prefix}.gate_and_up_proj.weight"),
        &[2 * width, hidden],
    );
    set.add(format!("{prefix}.down_proj.weight"), &[hidden, width]);
}

fn time_embedders(set: &mut Set, c: &ModelConfig) {
    let mut prefixes = vec!["timestep_emb", "time_embed", "time_embed_2"];
    if c.cfg_distilled {
        prefixes.push("guidance_emb");
    }
    if c.use_meanflow {
        prefixes.push("timestep_r_emb");
    }
    for p in prefixes {
        set.with_bias(&format!("{p}.mlp.0"), &[c.hidden_size, SINUSOID_WIDTH]);
        set.with_bias(&format!("{p}.mlp.2"), &[c.hidden_size, c.hidden_size]);
    }
}

/// `patch_embed` and `final_layer`: one adaptive residual block each.
fn image_stem_and_head(set: &mut Set, c: &ModelConfig) {
    let (hidden, inner, latent) = (c.hidden_size, c.patch_embed_hidden, c.vae.latent_channels);
    set.with_bias("patch_embed.model.0", &[inner, latent, 3, 3]);
    res_block(set, "patch_embed.model.1", inner, hidden, hidden);
    res_block(set, "final_layer.model.0", hidden, inner, hidden);
    set.norm("final_layer.model.1.0", inner);
    set.with_bias("final_layer.model.1.2", &[latent, inner, 3, 3]);
}

fn res_block(set: &mut Set, p: &str, input: usize, output: usize, emb: usize) {
    set.norm(&format!("{p}.in_layers.0"), input);
    set.with_bias(&format!("{p}.in_layers.2"), &[output, input, 3, 3]);
    set.with_bias(&format!("{p}.emb_layers.1"), &[2 * output, emb]);
    set.norm(&format!("{p}.out_layers.0"), output);
    set.with_bias(&format!("{p}.out_layers.3"), &[output, output, 3, 3]);
    // With equal widths the skip is the identity and has no tensor.
    if input != output {
        set.with_bias(&format!("{p}.skip_connection"), &[output, input, 1, 1]);
    }
}

fn vae_encoder(set: &mut Set, v: &VaeConfig) {
    let c = &v.block_out_channels;
    let levels = c.len();
    set.conv3d("vae.encoder.conv_in", c[0], v.in_channels);
    for (i, channels) in c.iter().enumerate() {
        for b in 0..v.layers_per_block {
            vae_block(set, &format!("vae.encoder.down.{i}.block.{b}"), *channels);
        }
        if i < v.spatial_levels() {
            let temporal = i >= v.spatial_levels() - v.temporal_levels();
            let cells = if temporal { 8 } else { 4 };
            set.conv3d(
                &format!("vae.encoder.down.{i}.downsample.conv"),
                c[i + 1] / cells,
                *channels,
            );
        }
    }
    vae_middle(set, "vae.encoder", c[levels - 1]);
    set.norm("vae.encoder.norm_out", c[levels - 1]);
    set.conv3d("vae.encoder.conv_out", 2 * v.latent_channels, c[levels - 1]);
}

fn vae_decoder(set: &mut Set, v: &VaeConfig) {
    let c: Vec<usize> = v.block_out_channels.iter().rev().copied().collect();
    let levels = c.len();
    set.conv3d("vae.decoder.conv_in", c[0], v.latent_channels);
    vae_middle(set, "vae.decoder", c[0]);
    for (i, channels) in c.iter().enumerate() {
        for b in 0..=v.layers_per_block {
            vae_block(set, &format!("vae.decoder.up.{i}.block.{b}"), *channels);
        }
        if i < v.spatial_levels() {
            let cells = if i < v.temporal_levels() { 8 } else { 4 };
            set.conv3d(
                &format!("vae.decoder.up.{i}.upsample.conv"),
                c[i + 1] * cells,
                *channels,
            );
        }
    }
    set.norm("vae.decoder.norm_out", c[levels - 1]);
    set.conv3d("vae.decoder.conv_out", v.out_channels, c[levels - 1]);
}

fn vae_block(set: &mut Set, p: &str, channels: usize) {
    for i in 1..=2 {
        set.norm(&format!("{p}.norm{i}"), channels);
        set.conv3d(&format!("{p}.conv{i}"), channels, channels);
    }
}

fn vae_middle(set: &mut Set, p: &str, channels: usize) {
    vae_block(set, &format!("{p}.mid.block_1"), channels);
    vae_block(set, &format!("{p}.mid.block_2"), channels);
    set.norm(&format!("{p}.mid.attn_1.norm"), channels);
    for name in ["q", "k", "v", "proj_out"] {
        set.with_bias(
            &format!("{p}.mid.attn_1.{name}"),
            &[channels, channels, 1, 1, 1],
        );
    }
}

fn vision(set: &mut Set, c: &ModelConfig) {
    let (v, width) = (&c.vit, c.vit.hidden_size);
    let p = "vision_model";
    set.with_bias(
        &format!("{p}.embeddings.patch_embedding"),
        &[width, v.patch_values()],
    );
    set.add(
        format!("{p}.embeddings.position_embedding.weight"),
        &[v.position_grid * v.position_grid, width],
    );
    for l in 0..v.num_layers {
        let p = format!("{p}.encoder.layers.{l}");
        set.norm(&format!("{p}.layer_norm1"), width);
        set.norm(&format!("{p}.layer_norm2"), width);
        for name in ["q_proj", "k_proj", "v_proj", "out_proj"] {
            set.with_bias(&format!("{p}.self_attn.{name}"), &[width, width]);
        }
        set.with_bias(&format!("{p}.mlp.fc1"), &[v.intermediate_size, width]);
        set.with_bias(&format!("{p}.mlp.fc2"), &[width, v.intermediate_size]);
    }
    set.norm(&format!("{p}.post_layernorm"), width);
    for i in 0..c.vit_aligner.depth {
        let input = if i == 0 {
            c.vit_aligner.input_dim
        } else {
            c.vit_aligner.output_dim
        };
        set.with_bias(
            &format!("vision_aligner.layers.{}", 2 * i),
            &[c.vit_aligner.output_dim, input],
        );
    }
}
