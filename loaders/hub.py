"""Models on the Hugging Face hub, through `huggingface_hub` and its cache."""

import glob
import logging
from pathlib import Path

from inferax.errors import SourceError
from inferax.loaders.listing import Choice, choose
from inferax.loaders.progress import ProgressFactory, progress_class

_TIMEOUT_S = 10.0


def fetch(
    repo: str,
    *,
    revision: str | None = None,
    quant: str | None = None,
    progress: bool | ProgressFactory = False,
    endpoint: str | None = None,
) -> Path:
    """Local path of the model `repo` ("org/name") at `revision` (a branch, tag or commit; default "main").

    Only the chosen model's files are fetched: safetensors with the json, jinja and tokenizer.model files beside them,
    or the parts of one GGUF. Where the hub cannot be asked (HF_HUB_OFFLINE, no network, an error of the hub's) a
    snapshot in its cache is used. A transfer that broke is resumed by the library or by the next call.
    `endpoint` is another hub's address.

    Raises SourceError: the model or revision does not exist, is private or gated, the quantization is not there, the
    weights are pickles, the network or disk failed and nothing is cached.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    revision = revision or "main"
    try:
        return _fetch(repo, revision, quant, progress, endpoint)
    except SourceError:
        raise
    except Exception as error:  # the HTTP client under huggingface_hub changes, and its exceptions with it
        reason = _explained(error, repo, revision, endpoint)
        folder = None if _is_final(error) else _cached_folder(repo, revision)
        if folder is None:
            raise reason from error
        try:
            path = _pick(folder, choose(repo, _names(folder), quant, ranked=True))
        except SourceError as cached:
            problem = f"{reason.problem}; the snapshot in {folder} {cached.problem}"
            raise SourceError(repo, problem, reason.remedy) from error
        if not isinstance(error, OfflineModeIsEnabled):
            logging.getLogger(__name__).warning("%s: %s; using %s", repo, reason.problem, path)
        return path


def _fetch(repo: str, revision: str, quant: str | None, progress: bool | ProgressFactory, endpoint: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi(endpoint=endpoint, library_name="inferax").model_info(repo, revision=revision, timeout=_TIMEOUT_S)
    choice = choose(repo, [file.rfilename for file in info.siblings or ()], quant, ranked=True)
    folder = _cached_folder(repo, info.sha) if info.sha else None
    if folder is not None and _has_all(folder, choice):
        return _pick(folder, choice)
    # The weights go last: where they are in the cache, so is all they need.
    for names in (choice.others, choice.weights):
        if names:
            folder = Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=[glob.escape(name) for name in names],
                    tqdm_class=progress_class(progress),
                    endpoint=endpoint,
                    library_name="inferax",
                )
            )
    if folder is None or not _has_all(folder, choice):
        raise SourceError(repo, f"revision {revision!r} changed while it was fetched", "Try again")
    return _pick(folder, choice)


def _cached_folder(repo: str, revision: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        # No pattern: where the folder is, not whether it is complete, which depends on the files wanted.
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[]))
    except (OSError, HFValidationError):
        return None


def _names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _has_all(folder: Path, choice: Choice) -> bool:
    return all((folder / name).is_file() for name in choice.others + choice.weights)


def _pick(folder: Path, choice: Choice) -> Path:
    return folder / choice.weights[0] if choice.is_gguf else folder


def _is_final(error: Exception) -> bool:
    """Whether the hub has answered, and the answer is that what is asked for does not exist."""
    from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

    return isinstance(error, RevisionNotFoundError | HFValidationError)


def _explained(error: BaseException, repo: str, revision: str, endpoint: str | None) -> SourceError:
    from huggingface_hub import constants, errors

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    local = f"If a local path was meant: there is none of this name under {Path.cwd()}"
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    if isinstance(error, errors.OfflineModeIsEnabled):
        problem = f"is not in the cache {constants.HF_HUB_CACHE}, and offline mode is on (HF_HUB_OFFLINE)"
        remedy = f"Fetch it once online. {local}"
    elif isinstance(error, errors.GatedRepoError):
        problem = "is gated: its terms have to be accepted"
        remedy = f"Accept them at {endpoint or constants.ENDPOINT}/{repo}, then {log_in}"
    elif isinstance(error, errors.RepositoryNotFoundError) or (
        isinstance(error, errors.HfHubHTTPError) and getattr(error.response, "status_code", None) == 401
    ):
        # The hub does not tell a stranger which of the two it is.
        problem = "is not on the hub, or is private"
        remedy = f"Check the name; for a private model, {log_in}. {local}"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem, remedy = f"has no revision {revision!r}", "Name a branch, tag or commit that exists"
    elif isinstance(error, errors.HFValidationError):
        problem, remedy = f"is not a model's name on the hub: {text}", "Names look like org/name"
    elif isinstance(error, errors.HfHubHTTPError):
        problem, remedy = f"the hub refused: {text}", f"Try again later; if access is missing, {log_in}"
    elif (
        isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError)
    ):
        problem = f"could not be written to the cache {constants.HF_HUB_CACHE} ({error.strerror})"
        remedy = "Make room there, or set HF_HOME to another folder"
    else:
        problem = f"could not be fetched from the hub ({type(error).__name__}: {text})"
        remedy = f"Connect to the network, or give a local path. {local}"
    return SourceError(repo, problem, remedy)
