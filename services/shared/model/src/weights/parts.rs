//! Which values are wanted of which stored tensors, and in what chunks they are read.

use std::ops::Range;

use kernels::DType;

use super::{Checkpoint, StoredType, TensorEntry, unreadable};
use crate::error::ModelError;

/// What is wanted of one stored tensor: some rows of it, or some columns of some rows.
///
/// The values come row after row without gaps. A row is everything that one index of dimension 0 selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape that it must have there.
    pub shape: Vec<usize>,
    /// Rows, in the order in which they are wanted.
    pub rows: Vec<Range<usize>>,
    /// Values of each row.
    pub columns: Range<usize>,
    /// Type in which they are wanted; other stored types are converted on the way, F32 to BF16 by rounding to
    /// nearest, ties to even.
    pub dtype: DType,
}

impl Part {
    /// All of a tensor.
    pub fn whole(name: impl Into<String>, shape: &[usize], dtype: DType) -> Self {
        let width = shape.iter().skip(1).product();
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            rows: std::iter::once(0..shape.first().copied().unwrap_or(1)).collect(),
            columns: 0..width,
            dtype,
        }
    }

    /// The same columns of these rows instead.
    #[must_use]
    pub fn with_rows(self, rows: Vec<Range<usize>>) -> Self {
        Self { rows, ..self }
    }

    /// These columns of the same rows instead.
    #[must_use]
    pub fn with_columns(self, columns: Range<usize>) -> Self {
        Self { columns, ..self }
    }

    /// Number of values wanted.
    pub fn numel(&self) -> usize {
        self.rows.iter().map(Range::len).sum::<usize>() * self.columns.len()
    }

    /// Their size.
    pub fn bytes(&self) -> usize {
        self.numel() * width(self.dtype)
    }

    /// Values of a stored row.
    fn stride(&self) -> usize {
        self.shape.iter().skip(1).product()
    }

    /// The values wanted, as runs in the stored tensor.
    fn runs(&self) -> Vec<Run> {
        let stride = self.stride();
        let run = |rows: &Range<usize>| {
            let start = rows.start * stride + self.columns.start;
            if self.columns.len() == stride {
                Run {
                    start,
                    rows: 1,
                    width: rows.len() * stride,
                    stride,
                }
            } else {
                Run {
                    start,
                    rows: rows.len(),
                    width: self.columns.len(),
                    stride,
                }
            }
        };
        let runs = self.rows.iter().map(run);
        runs.filter(|run| run.rows * run.width > 0).collect()
    }
}

/// Values of a stored tensor: `rows` times `width` of them, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: usize,
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

impl Run {
    /// Cuts off at most `room` values: whole rows, or any number of a single one. `None` if a row is more.
    pub(super) fn split(&mut self, room: usize) -> Option<Self> {
        let mut head = *self;
        if self.rows == 1 {
            head.width = self.width.min(room);
            self.start += head.width;
            self.width -= head.width;
        } else {
            head.rows = self.rows.min(room / self.width);
            self.start += head.rows * self.stride;
            self.rows -= head.rows;
        }
        (head.rows * head.width > 0).then_some(head)
    }

    fn is_empty(&self) -> bool {
        self.rows * self.width == 0
    }
}

/// Values of one part that are read together: they are consecutive in what is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Position of the part in the list.
    pub part: usize,
    /// Bytes of the part before these.
    pub offset: usize,
    /// Their size.
    pub bytes: usize,
    /// Whether the part ends with them. An empty part is one empty chunk.
    pub last: bool,
    pub(super) runs: Vec<Run>,
}

/// Bytes of a value.
pub(super) fn width(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 4,
        DType::Bf16 => 2,
    }
}

/// Chunks of at most `slot` bytes, in the order of the parts.
pub(super) fn plan(
    checkpoint: &Checkpoint,
    parts: &[Part],
    slot: usize,
) -> Result<Vec<Chunk>, ModelError> {
    let mut chunks = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        check(checkpoint, part)?;
        cut(index, part, slot, &mut chunks)?;
    }
    Ok(chunks)
}

/// Refuses what the checkpoint does not have, before anything is read.
fn check<'a>(checkpoint: &'a Checkpoint, part: &Part) -> Result<&'a TensorEntry, ModelError> {
    let entry = checkpoint.checked(&part.name, &part.shape)?;
    if entry.dtype == StoredType::Other {
        return Err(unreadable(&part.name));
    }
    let rows = part.shape.first().copied().unwrap_or(1);
    let inside = |r: &Range<usize>, end: usize| r.start <= r.end && r.end <= end;
    let fits = part.rows.iter().all(|r| inside(r, rows)) && inside(&part.columns, part.stride());
    if fits {
        return Ok(entry);
    }
    Err(ModelError::tensor(
        &part.name,
        format!(
            "rows {:?} and columns {:?} are not all within {:?}",
            part.rows, part.columns, part.shape
        ),
    ))
}

fn cut(index: usize, part: &Part, slot: usize, chunks: &mut Vec<Chunk>) -> Result<(), ModelError> {
    let value = width(part.dtype);
    let empty = |offset| Chunk {
        part: index,
        offset,
        bytes: 0,
        last: false,
        runs: Vec::new(),
    };
    let mut chunk = empty(0);
    for mut run in part.runs() {
        while !run.is_empty() {
            let room = (slot - chunk.bytes) / value;
            if let Some(head) = run.split(room) {
                chunk.bytes += head.rows * head.width * value;
                chunk.runs.push(head);
            } else if chunk.bytes > 0 {
                let offset = chunk.offset + chunk.bytes;
                chunks.push(std::mem::replace(&mut chunk, empty(offset)));
            } else {
                let message = format!("a row does not fit into a staging slot of {slot} bytes");
                return Err(ModelError::tensor(&part.name, message));
            }
        }
    }
    chunk.last = true;
    chunks.push(chunk);
    Ok(())
}
