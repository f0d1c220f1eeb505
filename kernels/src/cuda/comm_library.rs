//! NCCL, looked up when the first group is made. Its own border: what is called and what it says.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use super::error::{CudaError, Result};

/// File names it has in packages, the runtime package's first.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
const LIBRARY: &str = "nccl";
/// Bytes of the token that the ranks of a group share.
pub(super) const ID_BYTES: usize = 128;

/// Call finished.
pub(super) const SUCCESS: c_int = 0;
/// Call goes on in the background.
pub(super) const IN_PROGRESS: c_int = 7;
/// Element type "byte".
pub(super) const BYTES: c_int = 1;
/// Reduction "sum".
pub(super) const SUM: c_int = 0;

/// Oldest version that has everything used here, as the library counts: 10000 major, 100 minor.
const OLDEST: c_int = 21_800;
/// "Not chosen", for integers of [`Config`].
const UNDEFINED: c_int = c_int::MIN;
/// Marks a [`Config`] as initialised.
const MAGIC: u32 = 0xcafe_beef;

/// A group, to the library.
pub(super) type Handle = *mut c_void;
/// A CUDA stream, to the library.
pub(super) type Stream = *mut c_void;

/// The token, as the library passes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; ID_BYTES]);

/// Choices for a group, as of version 2.18: later ones read this too and take their defaults for the rest.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    min_blocks: c_int,
    max_blocks: c_int,
    network: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Calls return at once; at most `blocks` thread blocks an operation, if given.
    pub(super) fn nonblocking(blocks: Option<u32>) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: OLDEST.unsigned_abs(),
            blocking: 0,
            cluster_size: UNDEFINED,
            min_blocks: UNDEFINED,
            max_blocks: blocks.map_or(UNDEFINED, |n| c_int::try_from(n).unwrap_or(c_int::MAX)),
            network: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The functions that are used; each answers with a result code.
        pub(super) struct Nccl {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            error_text: unsafe extern "C" fn(c_int) -> *const c_char,
            last_error: unsafe extern "C" fn(Handle) -> *const c_char,
        }

        impl Nccl {
            fn resolve(library: &Library) -> Result<Self> {
                Ok(Self {
                    $($field: symbol(library, $symbol)?,)*
                    error_text: symbol(library, "ncclGetErrorString")?,
                    last_error: symbol(library, "ncclGetLastError")?,
                })
            }
        }
    };
}

functions! {
    version = "ncclGetVersion" (*mut c_int);
    unique_id = "ncclGetUniqueId" (*mut UniqueId);
    init = "ncclCommInitRankConfig" (*mut Handle, c_int, UniqueId, c_int, *mut Config);
    async_error = "ncclCommGetAsyncError" (Handle, *mut c_int);
    abort = "ncclCommAbort" (Handle);
    finalize = "ncclCommFinalize" (Handle);
    destroy = "ncclCommDestroy" (Handle);
    group_start = "ncclGroupStart" ();
    group_end = "ncclGroupEnd" ();
    send = "ncclSend" (*const c_void, usize, c_int, c_int, Handle, Stream);
    receive = "ncclRecv" (*mut c_void, usize, c_int, c_int, Handle, Stream);
    broadcast = "ncclBroadcast" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream);
    all_gather = "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, Stream);
    all_reduce = "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream);
    reduce_scatter = "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream);
}

fn symbol<F: Copy>(library: &Library, name: &'static str) -> Result<F> {
    // SAFETY: `functions!` gives every name the signature that it has in the library's header.
    let found = unsafe { library.get::<F>(name) };
    found.map(|f| *f).map_err(|_| CudaError::Library {
        library: LIBRARY,
        call: name,
        message: "the library does not have it: version 2.18 or later is needed".into(),
    })
}

impl Nccl {
    /// The library; loaded once, and never unloaded.
    ///
    /// # Errors
    /// `NoLibrary` when there is none, `Library` when it is too old. Never a panic.
    pub(super) fn get() -> Result<&'static Self> {
        static LOADED: OnceLock<Result<Nccl>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| Self::open(&NAMES));
        loaded.as_ref().map_err(Clone::clone)
    }

    /// The first of `names` that can be loaded.
    fn open(names: &[&'static str]) -> Result<Self> {
        for name in names {
            // SAFETY: runs the initialisers of a library that is made to be loaded.
            if let Ok(library) = unsafe { Library::new(*name) } {
                return Self::resolve(Box::leak(Box::new(library)))?.recent();
            }
        }
        Err(CudaError::NoLibrary { library: names[0] })
    }

    /// Its version: 10000 times the major one, 100 times the minor one, and the patch level.
    pub(super) fn number(&self) -> Result<c_int> {
        let mut number = 0;
        // SAFETY: writes one integer.
        self.check("ncclGetVersion", unsafe { (self.version)(&raw mut number) })?;
        Ok(number)
    }

    fn recent(self) -> Result<Self> {
        let number = self.number()?;
        if number >= OLDEST {
            return Ok(self);
        }
        Err(CudaError::Library {
            library: LIBRARY,
            call: "ncclGetVersion",
            message: format!("version {number} is too old, {OLDEST} is needed"),
        })
    }

    /// What a code means, with what the library last said about the group.
    pub(super) fn describe(&self, code: c_int, handle: Handle) -> String {
        // SAFETY: accepts any code and returns a string constant.
        let meaning = unsafe { (self.error_text)(code) };
        // SAFETY: accepts null; the text belongs to the library and is copied at once.
        let detail = unsafe { (self.last_error)(handle) };
        let (meaning, detail) = (text(meaning), text(detail));
        if detail.is_empty() {
            meaning
        } else {
            format!("{meaning}: {detail}")
        }
    }

    /// An error unless `code` says that the call went well or goes on.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if matches!(code, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        Err(CudaError::Library {
            library: LIBRARY,
            call,
            message: self.describe(code, std::ptr::null_mut()),
        })
    }
}

fn text(chars: *const c_char) -> String {
    if chars.is_null() {
        return String::new();
    }
    // SAFETY: not null, and the library ends its strings.
    let text = unsafe { CStr::from_ptr(chars) };
    text.to_string_lossy().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_or_another_is_a_typed_error() {
        let library = "libnccl-of-no-machine.so";
        let missing = Nccl::open(&[library]).err();
        assert_eq!(missing, Some(CudaError::NoLibrary { library }));
        let other = Nccl::open(&[library, "libc.so.6"]).err();
        assert!(
            matches!(
                other,
                Some(CudaError::Library {
                    call: "ncclGetVersion",
                    ..
                })
            ),
            "{other:?}"
        );
    }
}
