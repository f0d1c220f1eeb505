//! Sequence sharding as a table: which tensors of which modules are split over the sequence group,
//! and which are gathered again.
//!
//! A row of the table does not silently miss: a path that matches no module, a tensor that is not
//! there, or one with another number of dimensions is an error when the table is bound to a model.

mod split;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use split::SpSplit;

use crate::ParallelError;

/// One row: what happens to one tensor of the modules a path names.
///
/// Exactly one of `input` and `output`, and exactly one of `split_dim` and `gather_dim`, is given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpRow {
    /// `""` for the model itself, `blocks.0` for one module, `blocks.*` for every module there; a
    /// star stands for one name.
    pub module: String,
    /// Name of an input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<String>,
    /// Index of an output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<usize>,
    /// Keep this rank's shard along the dimension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split_dim: Option<usize>,
    /// Put the shards of all ranks together along the dimension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gather_dim: Option<usize>,
    /// Dimensions the tensor has.
    pub expected_dims: usize,
    /// Pad lengths that do not divide; without it they are an error.
    #[serde(default)]
    pub auto_pad: bool,
    /// The dimension starts with text tokens, which stay whole on every rank.
    #[serde(default)]
    pub text_first: bool,
}

/// The table of one model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SpPlan {
    /// Rows, in any order.
    pub rows: Vec<SpRow>,
}

/// What a model declares of one of its modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleDecl {
    /// Path, names joined by dots; empty for the model itself.
    pub path: String,
    /// Inputs: name and number of dimensions.
    pub inputs: Vec<(String, usize)>,
    /// Number of dimensions of each output.
    pub outputs: Vec<usize>,
}

/// A tensor at the border of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpTensor {
    /// An input by name.
    Input(String),
    /// An output by index.
    Output(usize),
}

/// What is done with a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpAction {
    /// Keep the own shard along a dimension.
    Split {
        /// The dimension.
        dim: usize,
    },
    /// Gather all shards along a dimension.
    Gather {
        /// The dimension.
        dim: usize,
    },
}

/// A row that was matched with one declared tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpRule {
    /// Path of the module.
    pub module: String,
    /// The tensor.
    pub tensor: SpTensor,
    /// What is done with it.
    pub action: SpAction,
    /// Dimensions the tensor has.
    pub dims: usize,
    /// Whether lengths that do not divide are padded.
    pub auto_pad: bool,
    /// Whether the dimension starts with text that stays whole.
    pub text_first: bool,
}

/// A table that fits a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BoundSpPlan {
    rules: Vec<SpRule>,
}

impl fmt::Display for SpTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(name) => write!(f, "input {name}"),
            Self::Output(index) => write!(f, "output {index}"),
        }
    }
}

impl SpAction {
    /// The dimension split or gathered.
    #[must_use]
    pub fn dim(self) -> usize {
        match self {
            Self::Split { dim } | Self::Gather { dim } => dim,
        }
    }
}

impl SpRow {
    /// The error that names this row.
    fn refused(&self, problem: impl Into<String>) -> ParallelError {
        let mut entry = format!("\"{}\"", self.module);
        if let Some(name) = &self.input {
            entry += &format!(" input {name}");
        }
        if let Some(index) = self.output {
            entry += &format!(" output {index}");
        }
        ParallelError::SpPlan {
            entry,
            problem: problem.into(),
        }
    }

    /// Checks the row by itself.
    fn parse(&self) -> Result<(SpTensor, SpAction), ParallelError> {
        let tensor = match (&self.input, self.output) {
            (Some(name), None) => SpTensor::Input(name.clone()),
            (None, Some(index)) => SpTensor::Output(index),
            _ => return Err(self.refused("give either input or output")),
        };
        let action = match (self.split_dim, self.gather_dim) {
            (Some(dim), None) => SpAction::Split { dim },
            (None, Some(dim)) => SpAction::Gather { dim },
            _ => return Err(self.refused("give either split_dim or gather_dim")),
        };
        if action.dim() >= self.expected_dims {
            let (dim, dims) = (action.dim(), self.expected_dims);
            return Err(self.refused(format!("dimension {dim} is not one of {dims}")));
        }
        if !self.module.is_empty() && self.module.split('.').any(str::is_empty) {
            return Err(self.refused("the path has an empty name"));
        }
        Ok((tensor, action))
    }

    /// True when the path names the module.
    fn matches(&self, path: &str) -> bool {
        let (mut names, mut own) = (path.split('.'), self.module.split('.'));
        loop {
            match (own.next(), names.next()) {
                (None, None) => return true,
                (Some("*"), Some(name)) if !name.is_empty() => {}
                (Some(a), Some(b)) if a == b => {}
                _ => return false,
            }
        }
    }

    /// Dimensions the module declares for the row's tensor.
    fn declared(&self, module: &ModuleDecl, tensor: &SpTensor) -> Result<usize, ParallelError> {
        let path = &module.path;
        match tensor {
            SpTensor::Input(name) => {
                let mut inputs = module.inputs.iter();
                let found = inputs.find(|(n, _)| n == name).map(|(_, dims)| *dims);
                found.ok_or_else(|| {
                    let names: Vec<_> = module.inputs.iter().map(|(n, _)| n.as_str()).collect();
                    let names = names.join(", ");
                    self.refused(format!("module \"{path}\" has only the inputs {names}"))
                })
            }
            SpTensor::Output(index) => module.outputs.get(*index).copied().ok_or_else(|| {
                let count = module.outputs.len();
                self.refused(format!("module \"{path}\" has {count} outputs"))
            }),
        }
    }
}

impl SpPlan {
    /// Matches every row with the modules a model declares.
    ///
    /// # Errors
    /// [`ParallelError::SpPlan`] naming the row: it is incomplete, matches no module, names a
    /// tensor that is not there or has other dimensions, or two rows concern one tensor.
    pub fn bind(&self, modules: &[ModuleDecl]) -> Result<BoundSpPlan, ParallelError> {
        let mut bound = BoundSpPlan::default();
        for row in &self.rows {
            let (tensor, action) = row.parse()?;
            let mut matched = modules.iter().filter(|m| row.matches(&m.path)).peekable();
            if matched.peek().is_none() {
                return Err(row.refused("no module has this path"));
            }
            for module in matched {
                let dims = row.declared(module, &tensor)?;
                let path = &module.path;
                if dims != row.expected_dims {
                    let expected = row.expected_dims;
                    return Err(row.refused(format!(
                        "{expected} dimensions expected, module \"{path}\" declares {dims}"
                    )));
                }
                if bound.find(path, &tensor).is_some() {
                    return Err(row.refused(format!("another row has {tensor} of \"{path}\"")));
                }
                bound.rules.push(SpRule {
                    module: path.clone(),
                    tensor: tensor.clone(),
                    action,
                    dims,
                    auto_pad: row.auto_pad,
                    text_first: row.text_first,
                });
            }
        }
        Ok(bound)
    }
}

impl BoundSpPlan {
    /// Every rule, row by row.
    #[must_use]
    pub fn rules(&self) -> &[SpRule] {
        &self.rules
    }

    fn find(&self, module: &str, tensor: &SpTensor) -> Option<&SpRule> {
        let mut rules = self.rules.iter();
        rules.find(|rule| rule.module == module && rule.tensor == *tensor)
    }

    /// The rule of an input, `None` when it stays as it is.
    #[must_use]
    pub fn input(&self, module: &str, name: &str) -> Option<&SpRule> {
        self.find(module, &SpTensor::Input(name.to_owned()))
    }

    /// The rule of an output, `None` when it stays as it is.
    #[must_use]
    pub fn output(&self, module: &str, index: usize) -> Option<&SpRule> {
        self.find(module, &SpTensor::Output(index))
    }
}

#[cfg(test)]
mod tests;
