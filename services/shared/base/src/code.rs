//! The one list of error codes, and the one place that maps them to HTTP statuses and process
//! exit codes. Numbers are those of gRPC, so that the wire mapping is the identity.
use std::fmt;

/// Why something failed, in the categories of gRPC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Code {
    /// The caller gave up.
    Cancelled = 1,
    /// A foreign error without a category.
    Unknown = 2,
    /// The caller sent something that can never work.
    InvalidArgument = 3,
    /// The deadline passed first.
    DeadlineExceeded = 4,
    /// The named thing does not exist.
    NotFound = 5,
    /// The named thing exists already.
    AlreadyExists = 6,
    /// The caller may not do this.
    PermissionDenied = 7,
    /// A quota, queue or pool is full; retry later.
    ResourceExhausted = 8,
    /// The system is not in the state the call needs.
    FailedPrecondition = 9,
    /// The call lost a race (an old epoch or generation); retry from a fresh view.
    Aborted = 10,
    /// Past the valid range.
    OutOfRange = 11,
    /// Not built in this version.
    Unimplemented = 12,
    /// A bug or a broken invariant.
    Internal = 13,
    /// The service is away; retry later.
    Unavailable = 14,
    /// Data failed its digest.
    DataLoss = 15,
    /// The caller did not say who it is.
    Unauthenticated = 16,
}

/// One row of the mapping table.
struct Row {
    code: Code,
    name: &'static str,
    http: u16,
    exit: u8,
}

const fn row(code: Code, name: &'static str, http: u16, exit: u8) -> Row {
    Row {
        code,
        name,
        http,
        exit,
    }
}

/// Exit code of a successful command.
pub const EXIT_OK: u8 = 0;
/// Exit code of an error without a better one.
pub const EXIT_FAILURE: u8 = 1;
/// Exit code of a command line that does not parse.
pub const EXIT_USAGE: u8 = 2;
/// Exit code of bad input or configuration.
pub const EXIT_CONFIG: u8 = 64;
/// Exit code when the service cannot be reached.
pub const EXIT_UNAVAILABLE: u8 = 69;

const TABLE: [Row; 16] = [
    row(Code::Cancelled, "CANCELLED", 499, EXIT_FAILURE),
    row(Code::Unknown, "UNKNOWN", 500, EXIT_FAILURE),
    row(Code::InvalidArgument, "INVALID_ARGUMENT", 400, EXIT_CONFIG),
    row(
        Code::DeadlineExceeded,
        "DEADLINE_EXCEEDED",
        504,
        EXIT_FAILURE,
    ),
    row(Code::NotFound, "NOT_FOUND", 404, EXIT_FAILURE),
    row(Code::AlreadyExists, "ALREADY_EXISTS", 409, EXIT_FAILURE),
    row(
        Code::PermissionDenied,
        "PERMISSION_DENIED",
        403,
        EXIT_FAILURE,
    ),
    row(
        Code::ResourceExhausted,
        "RESOURCE_EXHAUSTED",
        429,
        EXIT_FAILURE,
    ),
    row(
        Code::FailedPrecondition,
        "FAILED_PRECONDITION",
        400,
        EXIT_FAILURE,
    ),
    row(Code::Aborted, "ABORTED", 409, EXIT_FAILURE),
    row(Code::OutOfRange, "OUT_OF_RANGE", 400, EXIT_CONFIG),
    row(Code::Unimplemented, "UNIMPLEMENTED", 501, EXIT_FAILURE),
    row(Code::Internal, "INTERNAL", 500, EXIT_FAILURE),
    row(Code::Unavailable, "UNAVAILABLE", 503, EXIT_UNAVAILABLE),
    row(Code::DataLoss, "DATA_LOSS", 500, EXIT_FAILURE),
    row(Code::Unauthenticated, "UNAUTHENTICATED", 401, EXIT_FAILURE),
];

impl Code {
    /// Every code, in the order of its number.
    pub fn all() -> impl Iterator<Item = Code> {
        TABLE.iter().map(|row| row.code)
    }

    /// The gRPC number.
    pub fn number(self) -> i32 {
        self as i32
    }

    /// The code of a gRPC number; `None` for OK and for numbers gRPC does not define.
    pub fn from_number(number: i32) -> Option<Code> {
        Self::all().find(|code| code.number() == number)
    }

    /// The gRPC name, upper case.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The HTTP status that answers it.
    pub fn http_status(self) -> u16 {
        self.row().http
    }

    /// The exit code of a command that failed with it.
    pub fn exit_code(self) -> u8 {
        self.row().exit
    }

    /// The same call may succeed later, unchanged.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            Code::Unavailable | Code::ResourceExhausted | Code::Aborted
        )
    }

    fn row(self) -> &'static Row {
        // The numbers are dense from 1, checked by a test.
        &TABLE[self as usize - 1]
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_rows_are_dense_and_in_number_order() {
        for (index, code) in Code::all().enumerate() {
            assert_eq!(code.number(), i32::try_from(index).unwrap() + 1);
            assert_eq!(Code::from_number(code.number()), Some(code));
            assert_eq!(code.row().code, code);
        }
        assert_eq!(Code::from_number(0), None);
        assert_eq!(Code::from_number(17), None);
    }

    #[test]
    fn caller_faults_are_4xx_and_server_faults_5xx() {
        for code in Code::all() {
            let server = matches!(
                code,
                Code::Unknown
                    | Code::DeadlineExceeded
                    | Code::Unimplemented
                    | Code::Internal
                    | Code::Unavailable
                    | Code::DataLoss
            );
            let expected = if server { 5 } else { 4 };
            assert_eq!(code.http_status() / 100, expected, "{code}");
        }
    }

    #[test]
    fn exit_codes_tell_input_from_outage() {
        assert_eq!(Code::InvalidArgument.exit_code(), 64);
        assert_eq!(Code::Unavailable.exit_code(), 69);
        assert_eq!(Code::Internal.exit_code(), 1);
        assert!(Code::all().all(|code| code.exit_code() != EXIT_OK));
    }
}
