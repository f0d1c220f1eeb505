//! Memory that processes of one node map: a memory file handed from process to process.
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals,
    fcntl_get_seals, fstat, ftruncate, memfd_create, open,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::digest::{self, Store};

/// What a process may do with shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Look at it.
    Read,
    /// Look at it and change it.
    Write,
}

/// One mapping of a memory file.
///
/// The size of the file is fixed before anybody else sees it, and its pages are all there, so that
/// touching them never ends a process. Others write while this process runs, therefore it is never lent out
/// as a slice: bytes are copied in and out.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
    access: Access,
}

// SAFETY: the region is plain memory that is only reached through copies of bytes.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; a racing process can garble bytes, which checksums are there to find.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes a memory file of `bytes` bytes, zeroed, and maps it.
    ///
    /// # Errors
    /// What the system says; out of memory is found here and not at the first touch.
    pub fn create(bytes: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create(c"omni-kv-pool", flags)?;
        ftruncate(&file, bytes as u64)?;
        let memory = Self::map(file, bytes, Access::Write)?;
        let base = memory.base.as_ptr().cast::<c_void>();
        // Through the mapping, whose wish for large pages the file knows nothing of. Systems that cannot do it get
        // their pages below, all of which are there already in the other case.
        // SAFETY: the range was just mapped for writing, and nobody has used it yet.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxPopulateWrite) };
        fallocate(&memory.file, FallocateFlags::empty(), 0, bytes as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&memory.file, seals)?;
        Ok(memory)
    }

    /// Maps a memory file that another process made.
    ///
    /// # Errors
    /// `InvalidData` when the file could still shrink or is smaller than `bytes`; what the system says.
    pub fn open(file: OwnedFd, bytes: usize, access: Access) -> io::Result<Self> {
        let bad = |message| io::Error::new(io::ErrorKind::InvalidData, message);
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(bad("the size of the memory file is not fixed"));
        }
        let size = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        if bytes == 0 || size < bytes as u64 {
            return Err(bad("the memory file is smaller than announced"));
        }
        Self::map(file, bytes, access)
    }

    fn map(file: OwnedFd, bytes: usize, access: Access) -> io::Result<Self> {
        let protection = match access {
            Access::Read => ProtFlags::READ,
            Access::Write => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a fresh mapping at an address of the system's choice overlaps nothing.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        // SAFETY: the range was just mapped. Large pages are a wish, and their absence costs only time.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxHugepage) };
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self {
            file,
            base,
            bytes,
            access,
        })
    }

    /// A descriptor for another process, which can do with the memory what `access` says and no more.
    ///
    /// # Errors
    /// What the system says.
    pub fn descriptor(&self, access: Access) -> io::Result<OwnedFd> {
        use std::os::fd::AsRawFd as _;
        match access {
            Access::Write => self.file.try_clone(),
            Access::Read => {
                let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                Ok(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
            }
        }
    }

    /// Bytes in the region.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What this process may do with it.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Copies `[offset, offset + out.len())` of the region out. False, with `out` untouched, when
    /// that reaches past the end.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        if !self.holds(offset, out.len()) {
            return false;
        }
        // SAFETY: `offset` lies in the region, as checked above.
        let from = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: the range lies in the region, and `out` is memory of this process alone.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        true
    }

    /// Copies `bytes` to `[offset, offset + bytes.len())` of the region. False, with nothing written, when
    /// that reaches past the end or this mapping only reads.
    #[must_use]
    pub fn write(&self, offset: usize, bytes: &[u8]) -> bool {
        if self.access != Access::Write || !self.holds(offset, bytes.len()) {
            return false;
        }
        // SAFETY: `offset` lies in the region, as checked above.
        let to = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: the range lies in the region, which is mapped for writing; `bytes` is memory of this
        // process alone.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        true
    }

    /// As [`Self::read`], and gives the CRC32C of what has the checksum `crc` and the bytes that were copied
    /// behind it. `None` where [`Self::read`] gives false.
    #[must_use]
    pub fn read_crc32c(
        &self,
        offset: usize,
        out: &mut [u8],
        (crc, store): (u32, Store),
    ) -> Option<u32> {
        if !self.holds(offset, out.len()) {
            return None;
        }
        // SAFETY: `offset` lies in the region, as checked above.
        let from = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: the range lies in the region, and `out` is memory of this process alone.
        Some(unsafe { digest::copy(from, out.as_mut_ptr(), out.len(), (crc, store)) })
    }

    /// As [`Self::write`], and gives the CRC32C of what has the checksum `crc` and `bytes` behind it. `None`
    /// where [`Self::write`] gives false.
    #[must_use]
    pub fn write_crc32c(&self, offset: usize, bytes: &[u8], crc: u32) -> Option<u32> {
        if self.access != Access::Write || !self.holds(offset, bytes.len()) {
            return None;
        }
        // SAFETY: `offset` lies in the region, as checked above.
        let to = unsafe { self.base.as_ptr().add(offset) };
        let how = (crc, Store::Cached);
        // SAFETY: the range lies in the region, which is mapped for writing and of which no reference exists;
        // `bytes` is memory of this process alone.
        Some(unsafe { digest::copy(bytes.as_ptr(), to, bytes.len(), how) })
    }

    /// CRC32C of what has the checksum `crc` and `[offset, offset + len)` of the region behind it. `None` when
    /// that reaches past the end.
    #[must_use]
    pub fn crc32c(&self, offset: usize, len: usize, crc: u32) -> Option<u32> {
        if !self.holds(offset, len) {
            return None;
        }
        // SAFETY: `offset` lies in the region, as checked above.
        let from = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: the range lies in the region.
        Some(unsafe { digest::of(from, len, crc) })
    }

    fn holds(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.bytes)
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let base = self.base.as_ptr().cast::<c_void>();
        // SAFETY: the range was mapped by `map`, is unmapped once, and no reference into it exists.
        let _ = unsafe { munmap(base, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_mapping_writes_the_other_reads_and_a_reader_cannot_write() {
        let pool = SharedMemory::create(10_000).unwrap();
        let bytes = pool.bytes();
        let reader = pool.descriptor(Access::Read).unwrap();
        let reader = SharedMemory::open(reader, bytes, Access::Read).unwrap();
        let writer = pool.descriptor(Access::Write).unwrap();
        let writer = SharedMemory::open(writer, bytes, Access::Write).unwrap();
        assert!(writer.write(9_990, &[7; 10]));
        assert!(!writer.write(9_991, &[7; 10]) && !writer.write(usize::MAX, &[7; 2]));
        assert!(!reader.write(0, &[1]));
        let mut out = [0; 11];
        assert!(reader.read(9_989, &mut out));
        assert_eq!(out, [0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]);
        assert!(!reader.read(9_990, &mut out));
        // A descriptor that only reads cannot become one that writes.
        let again = pool.descriptor(Access::Read).unwrap();
        assert!(SharedMemory::open(again, bytes, Access::Write).is_err());
    }

    #[test]
    fn a_file_that_could_shrink_or_is_too_small_is_not_mapped() {
        let loose = memfd_create(c"loose", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&loose, 4096).unwrap();
        let error = SharedMemory::open(loose, 4096, Access::Read).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let pool = SharedMemory::create(4096).unwrap();
        let small = pool.descriptor(Access::Read).unwrap();
        assert!(SharedMemory::open(small, 4097, Access::Read).is_err());
        assert!(ftruncate(&pool, 1).is_err(), "its size is fixed");
    }
}
