//! The file of a picture. It is opened beside its target before the request is sent, so that an
//! unwritable place costs no generation, and renamed when complete, so that nobody sees half of it.
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use crate::error::CliError;

/// A picture on its way to disk. Dropped before [`PendingFile::commit`], it leaves nothing.
#[derive(Debug)]
pub(crate) struct PendingFile {
    target: PathBuf,
    part: PathBuf,
    file: Option<File>,
}

impl PendingFile {
    /// Opens a new file beside `target`; `tag` keeps two commands apart.
    pub(crate) fn open(target: &Path, tag: &str) -> Result<Self, CliError> {
        let Some(name) = target.file_name() else {
            return Err(refuse(target, "it names no file"));
        };
        if target.is_dir() {
            return Err(refuse(target, "it is a directory"));
        }
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{tag}.part"));
        let part = target.with_file_name(hidden);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&part)
            .map_err(|error| refuse(target, &plain(&error)))?;
        Ok(Self {
            target: target.to_owned(),
            part,
            file: Some(file),
        })
    }

    /// Writes everything and puts the file in its place.
    pub(crate) fn commit(mut self, bytes: &[u8]) -> Result<(), CliError> {
        let Some(mut file) = self.file.take() else {
            return Ok(());
        };
        let written = file
            .write_all(bytes)
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::rename(&self.part, &self.target));
        written.map_err(|error| {
            let _ = fs::remove_file(&self.part);
            refuse(&self.target, &plain(&error))
        })
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            let _ = fs::remove_file(&self.part);
        }
    }
}

fn refuse(path: &Path, reason: &str) -> CliError {
    CliError::Output {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
}

/// The reason in words of our own where the system's are unclear about what is missing.
fn plain(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "its directory does not exist".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ => error.to_string(),
    }
}
