//! The programs `feedline` and `preprocess`, for the scripts of the wheel, and where log lines go.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::panic::catch_unwind;
use std::sync::OnceLock;

use log::{LevelFilter, Log, Metadata, Record};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use storage::StderrLog;
use tools::command::Invocation;

/// The exit code of a binary whose main thread panics.
const EXIT_PANICKED: u8 = 101;

/// Runs a program as its binary does, and returns the exit code. `restart` are the words that start
/// it again.
///
/// The caller must have restored the default actions of signals, and must exit afterwards: the
/// libraries log to the program from then on.
#[pyfunction]
pub(crate) fn run_program(
    py: Python<'_>,
    name: &str,
    arguments: Vec<OsString>,
    restart: Vec<OsString>,
) -> PyResult<u8> {
    let command_line = [OsString::from(name)].into_iter().chain(arguments).collect();
    let program: Box<dyn FnOnce() -> u8 + Send> = match name {
        "feedline" => {
            let invocation = Invocation { command_line, restart };
            Box::new(move || tools::command::run(&invocation))
        }
        "preprocess" => Box::new(move || preprocess::cli::run(command_line)),
        _ => {
            return Err(PyValueError::new_err(format!(
                "cannot run program {name}: expected feedline or preprocess"
            )));
        }
    };
    // As in the binaries, where nothing logs before a program sets its level.
    log::set_max_level(LevelFilter::Off);
    OF_PROGRAM.get_or_init(|| &StderrLog);
    Ok(py.detach(|| {
        let code = catch_unwind(std::panic::AssertUnwindSafe(program)).unwrap_or(EXIT_PANICKED);
        // A binary does this when it exits, and ignores errors, too.
        let _ = io::stdout().flush();
        code
    }))
}

/// The logger of the running program.
static OF_PROGRAM: OnceLock<&'static dyn Log> = OnceLock::new();

/// Sends log lines to Python's logging, or to a program that this process runs.
#[derive(Debug)]
struct LogLines(pyo3_log::Logger);

impl LogLines {
    fn target(&self) -> &dyn Log {
        OF_PROGRAM.get().copied().unwrap_or(&self.0)
    }
}

impl Log for LogLines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.target().enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        self.target().log(record);
    }

    fn flush(&self) {
        self.target().flush();
    }
}

/// Sends the log lines of the libraries to Python's logging.
pub(crate) fn log_to_python(py: Python<'_>) -> PyResult<()> {
    // Loggers are cached, levels are not: `setLevel` works at any time.
    let bridge = pyo3_log::Logger::new(py, pyo3_log::Caching::Loggers)?;
    let bridge = bridge.filter(LevelFilter::Info);
    // A host that has set up logging in this process before keeps it.
    if log::set_boxed_logger(Box::new(LogLines(bridge))).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
    Ok(())
}
