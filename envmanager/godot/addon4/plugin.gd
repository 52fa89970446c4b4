@tool
extends EditorPlugin
## Adds the bridge to the project's autoloads while the plugin is enabled.

const NAME := "EnvManager"


func _enable_plugin() -> void:
	if not ProjectSettings.has_setting("autoload/" + NAME):
		add_autoload_singleton(NAME, "res://addons/envmanager/bridge.gd")


func _disable_plugin() -> void:
	remove_autoload_singleton(NAME)
