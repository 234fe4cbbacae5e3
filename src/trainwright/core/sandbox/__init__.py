"""Running Python programs that nobody has read: generated code, tests, answers to be rewarded."""

from trainwright.core.sandbox.sandbox import Limits, Program, Result, Sandbox, SandboxError

__all__ = ["Limits", "Program", "Result", "Sandbox", "SandboxError"]
