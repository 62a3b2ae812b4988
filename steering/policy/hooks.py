"""Whom a rule tells: a web server, Slurm, Kubernetes, a program. Pure; acting/hook_files.py looks at their files."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator
from pydantic_core.core_schema import ValidationInfo

from pytools.units import SECOND
from steering.policy.base import Count, Duration, LongerThanZero, Model, NotNull, Within, bad

HookKind = Literal["webhook", "slurm", "kubernetes", "exec"]
HOOK_KINDS: Final[tuple[HookKind, ...]] = ("webhook", "slurm", "kubernetes", "exec")
STATE_KINDS: Final = ("slurm", "kubernetes")  # their far end has one state, not an event for each occurrence
_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"


def _exactly_one(*keys: str) -> ConfigDict:
    """What the JSON Schema has to say besides; consistency.py says it to people."""
    return ConfigDict(json_schema_extra={"allOf": [{"oneOf": [{"required": [key]} for key in keys]}]})


def _url(value: object) -> str:
    expected = bad("an URL such as https://noc.example/swerve, without a user or a fragment")
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        fits = parts.scheme in ("https", "http") and parts.hostname and parts.port != 0
    except ValueError:
        raise expected from None
    text = str(value)
    if not fits or parts.username is not None or "#" in text or not text.isascii() or not text.isprintable():
        raise expected
    if " " in text:
        raise expected
    return text


def _https(value: object) -> str:
    text = _url(value)
    if not text.startswith("https://"):
        raise bad("an URL such as https://192.0.2.1:6443")
    return text


def is_loopback(url: str) -> bool:
    """Whether what is sent there does not leave the host."""
    name = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


Url = Annotated[str, BeforeValidator(_url), WithJsonSchema({"type": "string", "examples": ["https://noc.example/x"]})]
HttpsUrl = Annotated[
    str, BeforeValidator(_https), WithJsonSchema({"type": "string", "examples": ["https://192.0.2.1:6443"]})
]
Absolute = Annotated[
    str, Field(strict=True, max_length=1024, pattern=r"^/[^\x00-\x1f]+$", examples=["/etc/swerve/noc.pem"])
]
Program = Annotated[
    str, Field(strict=True, max_length=1024, pattern=r"^/[^\x00-\x1f]+$", examples=["/usr/local/sbin/page"])
]
HookName = Annotated[str, Field(strict=True, pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$", examples=["noc"])]
Node = Annotated[str, Field(strict=True, max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
_QUALIFIED = r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"


class Webhook(Model):
    """Post the event as JSON. Redirects and proxies are not followed; an answer of 200 to 299 counts as received."""

    url: Url = Field(description="where to; TLS certificates are verified")
    ca_file: NotNull[Absolute] = Field(
        default=None, description="PEM file of the authorities to trust; default: the system's"
    )
    secret_file: NotNull[Absolute] = Field(
        default=None, description="file with the value of a header, which nobody else may read; only with https"
    )
    secret_header: Annotated[
        str, Field(strict=True, max_length=64, pattern=r"^[A-Za-z0-9-]+$", examples=["Authorization"])
    ] = Field(default="Authorization", description="the name of that header")

    @field_validator("secret_file")
    @classmethod
    def _kept_secret(cls, file: str | None, info: ValidationInfo) -> str | None:
        url = info.data.get("url")
        if file is not None and url is not None and not url.startswith("https:") and not is_loopback(url):
            raise bad("a secret only where url is https")
        return file


class Slurm(Model):
    """Drain this host's node with the reason; resume it when all is well, if it is still drained for that reason."""

    scontrol: Program = Field(
        default="/usr/bin/scontrol", description="its path; only root can write it and the directories above it"
    )
    node: NotNull[Node] = Field(default=None, description="name of the node; default: this host's name in swerve")


class Taint(Model):
    """A taint of the node, with the value swerve."""

    key: Annotated[str, Field(strict=True, max_length=317, pattern=_QUALIFIED, examples=["swerve/degraded"])] = Field(
        description="its key, which nobody else uses"
    )
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        default="NoSchedule", description="what it does to pods"
    )


class Kubernetes(Model):
    """Set a taint or a condition of this host's node; remove it when all is well, if it is still ours."""

    model_config = _exactly_one("taint", "condition")

    taint: NotNull[Taint] = None
    condition: NotNull[
        Annotated[str, Field(strict=True, max_length=317, pattern=_QUALIFIED, examples=["NetworkDegraded"])]
    ] = Field(default=None, description="type of a condition that is True meanwhile, with the reason Swerve")
    node: NotNull[Node] = Field(default=None, description="name of the node; default: this host's name in swerve")
    server: NotNull[HttpsUrl] = Field(
        default=None, description="API server; default: KUBERNETES_SERVICE_HOST and _PORT, as in a pod"
    )
    token_file: Absolute = Field(default=f"{_ACCOUNT}/token", description="token of a service account")
    ca_file: Absolute = Field(default=f"{_ACCOUNT}/ca.crt", description="PEM file of the server's authorities")


class Exec(Model):
    """Run a program with the event as JSON on standard input: no shell, a clean environment, root's own file."""

    program: Program = Field(description="its path; only root can write it and the directories above it")
    arguments: Annotated[
        tuple[Annotated[str, Field(strict=True, max_length=4096, pattern=r"^[^\x00]*$")], ...], Field(max_length=64)
    ] = Field(default=(), description="its arguments, as they are")


class Limit(Model):
    """How often a hook is called; what is over before it is due is never sent."""

    count: Count = Field(default=30, description="number of calls, repetitions included")
    per: LongerThanZero = Field(default=60 * SECOND, description="time in which they count")


class Hook(Model):
    """Whom rules with then.notify tell: exactly one of webhook, slurm, kubernetes and exec, and how."""

    model_config = _exactly_one(*HOOK_KINDS)

    webhook: NotNull[Webhook] = None
    slurm: NotNull[Slurm] = None
    kubernetes: NotNull[Kubernetes] = None
    exec_: NotNull[Exec] = Field(default=None, alias="exec")
    lease: Annotated[Duration, Within(10 * SECOND, 86_400 * SECOND)] = Field(
        default=300 * SECOND,
        description="an event counts for this long (expires_at); it is repeated in half the time while its cause lasts",
    )
    timeout: Annotated[Duration, Within(SECOND, 60 * SECOND)] = Field(
        default=10 * SECOND, description="a call that takes longer is killed, with all processes of its group"
    )
    tries: Annotated[int, Field(strict=True, ge=1, le=20)] = Field(
        default=5, description="calls until one is received, 1, 2, 4 ... 30 s apart; then again at the next lease"
    )
    limit: Limit = Field(default_factory=Limit)

    @property
    def kind(self) -> HookKind:
        """Which of them it is."""
        return next(kind for kind in HOOK_KINDS if self.options_of(kind) is not None)

    @property
    def options(self) -> Webhook | Slurm | Kubernetes | Exec:
        """Its own settings."""
        found = self.options_of(self.kind)
        assert found is not None
        return found

    def options_of(self, kind: HookKind) -> Webhook | Slurm | Kubernetes | Exec | None:
        """The settings of a kind; None where it is of another."""
        found: Webhook | Slurm | Kubernetes | Exec | None = getattr(self, "exec_" if kind == "exec" else kind)
        return found
