extends "res://addons/envmanager/arena.gd"
## A box falls on a floor, in 3D, and is pushed about.

var ticks := 0

@onready var box: RigidBody3D = $"../Box"


func reset(from: RandomNumberGenerator, _options: Dictionary) -> void:
	var start := Vector3(from.randf_range(-5, 5), from.randf_range(1, 3), from.randf_range(-5, 5))
	place_3d(box, Transform3D(Basis(Vector3.UP, from.randf()), start), Vector3(0, -1, 0))
	box.constant_force = Vector3.ZERO
	ticks = 0


func observe() -> PackedFloat32Array:
	var at := box.position
	var speed := box.linear_velocity
	return PackedFloat32Array([at.x, at.y, at.z, speed.x, speed.y, speed.z])


func act(continuous: PackedFloat32Array, _discrete: PackedInt32Array) -> void:
	box.constant_force = Vector3(10 * continuous[0], 0, 10 * continuous[1])


func after_tick() -> void:
	ticks += 1
	if ticks == 60:
		end_episode(true)
